"""Work that grows with the data and no faster: counted, not timed."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core._splitting import split_groups
from steerlab.core.contrast_pairs import balanced_flips
from steerlab.core.results import Activations
from steerlab.experiment._store.cell_engine import CellEngine
from steerlab.experiment._store.results import Results
from steerlab.experiment.measurements._registry import KINDS
from steerlab.experiment.measurements.effect import _comparisons as comparisons
from steerlab.experiment.measurements.effect import _figures
from steerlab.experiment.measurements.effect._comparisons import with_comparisons
from tests.experiment.data import TARGETS
from tests.experiment.test_effect import make_effect


class Counted(list):
    """A list that counts how often it is gone through from end to end."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()

    def count(self, value: Any) -> int:
        self.passes += 1
        return super().count(value)


@pytest.mark.parametrize("n_groups", [10, 1000])
def test_splits_and_flips_go_through_the_groups_a_few_times_only(n_groups: int) -> None:
    names = [f"g{k % n_groups}" for k in range(2 * n_groups)]
    split, flipped = Counted(names), Counted(names)
    left, right = split_groups(split, 0.8, 0)
    assert sorted(left + right) == list(range(len(names)))
    assert len(left) == pytest.approx(0.8 * len(names), abs=2)
    assert not {names[i] for i in left} & {names[i] for i in right}
    flips = balanced_flips(flipped, np.random.default_rng(0))
    assert Counter(name for name, flip in zip(names, flips, strict=True) if flip) == dict.fromkeys(names, 1)
    assert max(split.passes, flipped.passes) <= 6


def test_comparing_effects_adjusts_each_family_once(monkeypatch: pytest.MonkeyPatch) -> None:
    effects = []
    for k in range(20):
        effect = make_effect([9.0, 10.0, 11.0, 10.5 + k / 100], nulls={"random": list(np.linspace(-1, 1, 20))})
        object.__setattr__(effect, "plan_hash", f"p{k}")
        effects.append(effect)
    calls: Counter[str] = Counter()
    real = comparisons.holm

    def holm(ranks: Any) -> Any:
        calls["holm"] += 1
        return real(ranks)

    monkeypatch.setattr(comparisons, "holm", holm)
    told = with_comparisons(effects)
    assert calls["holm"] == 1
    assert {effect.comparisons.n_tested for effect in told} == {20}
    calls.clear()
    results = Results(KINDS)
    results.put_all(("effect", effect.plan_hash, (effect, sl.Plan())) for effect in effects)
    assert calls["holm"] == 1, "reading a run back compares once"
    assert results.find("effect", "p7")[0].plan_hash == "p7"


def test_control_slopes_look_at_each_row_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = _figures.item_table

    def counting(rows: pd.DataFrame, *arguments: Any) -> Any:
        seen.append(len(rows))
        return real(rows, *arguments)

    monkeypatch.setattr(_figures, "item_table", counting)
    sizes = {}
    for draws in (20, 80):
        seen.clear()
        effect = make_effect([9.0, 10.0, 11.0], nulls={"random": list(np.linspace(-1, 1, draws))})
        assert len(effect.null_slopes) == draws
        sizes[draws] = sum(seen)
    assert sizes[80] < 8 * sizes[20]


def test_many_plans_in_one_call_of_an_engine_are_told_apart(tiny_llama_engine: sl.LensEngine) -> None:
    v = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(0)), layer=1)
    exp = sl.Experiment("run", tiny_llama_engine, root=None)
    exp._session.open()
    plans = [None, *(sl.Plan(sl.add(v, coef=float(k))) for k in (1, 2, 3))]
    prompts = [item.prompt for _ in plans for item in TARGETS]
    rows = [item.targets for _ in plans for item in TARGETS]
    each = [plan for plan in plans for _ in TARGETS]
    found = CellEngine(exp._session).score(prompts, rows, plan=each)
    direct = tiny_llama_engine.score(prompts, rows, plan=each)
    assert found.log_prob == pytest.approx(direct.log_prob, abs=1e-5)
    assert [s.prompt_index for s in found] == [s.prompt_index for s in direct]


def test_one_prompt_s_activations_are_cut_without_counting_all_before() -> None:
    positions = Counted([(0,), (0, 1), (0, 1, 2)])
    values = torch.arange(6.0)[:, None].expand(6, 2)
    made = Activations("resid_post", (1,), (values,), tuple(positions), None, ((1,), (1, 2), (1, 2, 3)))
    object.__setattr__(made, "positions", positions)
    before = positions.passes
    assert [made.of(k, 1)[:, 0].tolist() for k in (0, 1, 2, -1)] == [
        [0.0],
        [1.0, 2.0],
        [3.0, 4.0, 5.0],
        [3.0, 4.0, 5.0],
    ]
    assert positions.passes == before + 1
    with pytest.raises(IndexError):
        made.of(3, 1)


def test_the_state_of_a_run_is_read_again_only_if_another_wrote_it(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(0)), layer=1)
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    exp.transfer(sl.Plan(sl.add(v, dose=1.0)), TARGETS, [0, 0.1])
    reads: list[Path] = []
    real = sl.experiment._store.session.read_run
    monkeypatch.setattr(sl.experiment._store.session, "read_run", lambda path: (reads.append(path), real(path))[1])
    for dose in (0.2, 0.3, 0.4):
        exp.transfer(sl.Plan(sl.add(v, dose=1.0)), TARGETS, [0, dose])
    assert not reads
    other = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    other.transfer(sl.Plan(sl.add(v, dose=1.0)), TARGETS, [0, 0.5])
    exp.transfer(sl.Plan(sl.add(v, dose=1.0)), TARGETS, [0, 0.6])
    assert len(sl.Experiment.load(exp.path).results.transfers) == 6
    other.close()
    exp.close()
