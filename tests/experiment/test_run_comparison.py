from pathlib import Path

import pytest

import steerlab as sl
from steerlab.core.errors import InputError, RunError
from steerlab.experiment.run_comparison import compare
from tests.experiment.data import PAIRS, TARGETS, TEXTS

OPTIONS = {"controls": sl.Controls(random=0), "neutral": TEXTS, "max_ppl_ratio": 50.0}


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
    assert row["shared_rows"] == len(TARGETS) * 2, "doses −0.1 and 0"
    ours, theirs = (exp.effects[0].rows.query("dose in [-0.1, 0]").value.to_numpy() for exp in (one, other))
    assert row["largest_difference"] == pytest.approx(abs(ours - theirs).max())
    assert (found.only_a, found.only_b) == ([], [1])
    assert "effect 1: only in the second run" in str(found)
    assert compare(other, one).only_a == [1]


def test_only_runs_compare(tmp_path: Path, tiny_llama_engine: sl.LensEngine) -> None:
    exp = sl.Experiment("one", tiny_llama_engine, root=None)
    with pytest.raises(RunError, match="not a run directory"):
        compare(exp, tmp_path)
    with pytest.raises(InputError, match="dict"):
        compare(exp, {})  # pyright: ignore
