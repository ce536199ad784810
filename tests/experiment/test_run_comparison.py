from pathlib import Path
from typing import Any

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError, RunError
from steerlab.experiment.run_comparison import compare
from tests.experiment.data import PAIRS, TARGETS, TEXTS

OPTIONS: dict[str, Any] = {"controls": sl.Controls(random=0), "neutral": TEXTS, "max_ppl_ratio": 50.0}


def run(engine: sl.LensEngine, root: Path | None, name: str, doses: list[float], seed: int = 0) -> sl.Experiment:
    exp = sl.Experiment(name, engine, root=root, seed=seed)
    vectors = exp.extract(PAIRS, layers=[1], name="same")
    exp.effect(sl.Plan(sl.add(vectors[1], dose=1.0)), TARGETS, doses, **OPTIONS)
    return exp


def test_a_run_does_not_differ_from_itself(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    one = run(tiny_llama_engine, tmp_path, "one", [-0.1, 0, 0.1])
    found = compare(one, one.path)
    assert found.differences.empty
    assert found.effects.matched_by.tolist() == ["plan"]
    assert found.effects.largest_difference.tolist() == [0.0]
    assert found.effects.shared_rows.tolist() == [len(TARGETS) * 3]
    assert "same configuration" in str(found)


def test_what_differs_is_named_and_effects_are_matched(
    tiny_llama_engine: sl.LensEngine, tiny_gpt2_engine: sl.LensEngine, tmp_path: Path
) -> None:
    one = run(tiny_llama_engine, tmp_path, "one", [-0.1, 0, 0.1])
    other = run(tiny_gpt2_engine, tmp_path, "other", [-0.1, 0, 0.2], seed=1)
    extra = sl.Plan(sl.ablate(other.results.vectors[0][1]))
    other.effect(extra, TARGETS, [0, 1], **OPTIONS)
    found = compare(one.path, other.path)
    assert {"model", "seed", "weights_hash"} <= set(found.differences.entry)
    assert "backend" not in set(found.differences.entry)
    (row,) = found.effects.to_dict("records")
    assert (row["matched_by"], row["effect_a"], row["effect_b"]) == ("words", 0, 0)
    assert row["slope_a"] == pytest.approx(one.effects[0].slope)
    assert row["low_b"] == pytest.approx(other.effects[0].ci[0])
    assert row["shared_rows"] == 0, "another model's vectors make another plan"
    assert "no rows of the same plan" in str(found)
    assert (found.only_a, found.only_b) == ([], [1])
    assert "effect 1: only in the second run" in str(found)
    assert compare(other, one).only_a == [1]


def drawn(seed: int) -> sl.Plan:
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), dose=1.0))


def test_rows_of_other_draws_are_not_compared(tiny_llama_engine: sl.LensEngine) -> None:
    def measured(seed: int) -> sl.Experiment:
        exp = sl.Experiment("one", tiny_llama_engine, root=None, seed=seed)
        with pytest.warns(UserWarning, match="cannot rank"):
            controls = sl.Controls(random=2, wrong_layer=True)
        options: dict[str, Any] = OPTIONS | {"controls": controls}
        exp.effect(drawn(0), TARGETS, [-0.1, 0, 0.1], **options)
        return exp

    one, other = measured(0), measured(1)
    (row,) = compare(one, other).effects.to_dict("records")
    assert row["shared_rows"] == len(TARGETS) * (3 + 2), "three doses of the vector, two of it at another layer"
    assert row["largest_difference"] == 0.0
    assert row["other_draws"] == len(TARGETS) * 2 * 2
    assert f"{row['other_draws']} control rows are of other draws and were not compared" in str(compare(one, other))
    assert "other draws" not in str(compare(one, measured(0)))


def test_the_largest_difference_is_that_of_the_same_plan(
    tiny_llama_engine: sl.LensEngine, tiny_gpt2_engine: sl.LensEngine
) -> None:
    one, other = (sl.Experiment("one", engine, root=None) for engine in (tiny_llama_engine, tiny_gpt2_engine))
    coefficients = sl.Plan(sl.add(drawn(0).edits[0].vector, coef=1.0))
    one.effect(coefficients, TARGETS, [-0.1, 0, 0.1], **OPTIONS)
    other.effect(coefficients, TARGETS, [-0.1, 0, 0.2], **OPTIONS)
    (row,) = compare(one, other).effects.to_dict("records")
    assert (row["matched_by"], row["shared_rows"]) == ("plan", len(TARGETS) * 2), "doses −0.1 and 0"
    ours, theirs = (exp.effects[0].rows.query("dose in [-0.1, 0]").value.to_numpy() for exp in (one, other))
    assert row["largest_difference"] == pytest.approx(abs(ours - theirs).max())


def test_settings_intervals_and_verdicts_are_printed(tiny_llama_engine: sl.LensEngine) -> None:
    one, other = (sl.Experiment("one", tiny_llama_engine, root=None) for _ in range(2))
    ours = one.effect(drawn(0), TARGETS, [-0.1, 0, 0.1], **OPTIONS)
    with pytest.warns(UserWarning, match="cannot rank"):
        controls = sl.Controls(random=2)
    options: dict[str, Any] = OPTIONS | {"controls": controls, "max_ppl_ratio": 40.0}
    theirs = other.effect(drawn(0), TARGETS, [-0.2, 0, 0.2], **options)
    found = compare(one, other)
    assert str(found).splitlines()[:3] == [
        "effect 0 doses: -0.1, 0, 0.1 | -0.2, 0, 0.2",
        "effect 0 controls: none | 2 random",
        "effect 0 max_ppl_ratio: 50 | 40",
    ]
    assert len(found.differences) == 3
    for effect in (ours, theirs):
        assert f"{effect.slope:+.4g} [{effect.ci[0]:+.4g}, {effect.ci[1]:+.4g}], {effect.verdict}" in str(found)


def test_effects_in_another_order_do_not_differ(tiny_llama_engine: sl.LensEngine) -> None:
    one, other = (sl.Experiment("one", tiny_llama_engine, root=None) for _ in range(2))
    calls = [
        (drawn(0), TARGETS, [-0.1, 0, 0.1]),
        (drawn(0), TARGETS, [-0.2, 0, 0.2]),
        (drawn(0), TARGETS.take([0, 1]), [-0.1, 0, 0.1]),
        (drawn(1), TARGETS, [-0.1, 0, 0.1]),
    ]
    for call in calls:
        one.effect(*call, **OPTIONS)
    for call in reversed(calls):
        other.effect(*call, **OPTIONS)
    found = compare(one, other)
    assert found.differences.empty
    assert found.effects[["effect_a", "effect_b"]].to_numpy().tolist() == [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert set(found.effects.matched_by) == {"plan"}
    assert found.effects.largest_difference.tolist() == [0.0] * 4


def test_what_is_not_the_same_is_matched_by_items_then_by_order(tiny_llama_engine: sl.LensEngine) -> None:
    one, other = (sl.Experiment("one", tiny_llama_engine, root=None) for _ in range(2))
    other_items, doses = TARGETS.take([0, 1]), [-0.1, 0, 0.1]
    one.effect(drawn(0), TARGETS.take([0]), doses, **OPTIONS)
    one.effect(drawn(0), TARGETS, doses, **OPTIONS)
    other.effect(drawn(0), TARGETS, doses, metric="choice_prob", **OPTIONS)
    other.effect(drawn(0), other_items, doses, **OPTIONS)
    found = compare(one, other)
    assert found.effects[["effect_a", "effect_b", "matched_by"]].to_numpy().tolist() == [
        [0, 1, "order"],
        [1, 0, "targets"],
    ]
    assert found.effects.shared_rows.tolist() == [0, 0], "other items; values of another metric"
    assert found.differences.entry.tolist() == ["effect 0 | 1 targets_hash", "effect 1 | 0 metric"]
    slope = f"{one.effects[1].slope:+.4g} log_prob_margin"
    assert slope in str(found), "slopes of two metrics are not put side by side without their names"


def test_only_runs_compare(tmp_path: Path, tiny_llama_engine: sl.LensEngine) -> None:
    exp = sl.Experiment("one", tiny_llama_engine, root=None)
    with pytest.raises(RunError, match="not a run directory"):
        compare(exp, tmp_path)
    with pytest.raises(InputError, match="dict"):
        compare(exp, {})  # pyright: ignore
