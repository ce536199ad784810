"""Every benchmark script says what it takes, and what its figures are made of does what it says."""

import importlib.util
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import interval_coverage, reference_experiments, slope_tables, verdict_rates, vllm_steering
from benchmarks.axbench import tables_of
from steerlab.measures import cluster_t_mean

FOLDER = Path(slope_tables.__file__).parent
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_says_what_it_takes(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if "import triton" in path.read_text(encoding="utf-8") and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed.")
    monkeypatch.syspath_prepend(str(FOLDER))  # scripts import from each other by name
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage:")
    assert f"benchmarks/{path.name}" in shown or f"benchmarks.{path.stem}" in shown, "no example of a call"


def test_the_plans_of_the_check_inside_vllm_are_plans() -> None:
    plans = vllm_steering.check_plans(16)
    operators = {edit.operator.to_json()["kind"] for plan in plans if plan is not None for edit in plan}
    assert operators >= {"add", "ablate", "clamp", "set", "rotate", "feature"}


# --- slopes from a table ------------------------------------------------------------------------------------------


@pytest.fixture
def slopes() -> slope_tables.Slopes:
    rng = np.random.default_rng(0)
    groups = [str(k // 3) for k in range(12)]
    gradients = {positions: rng.normal(size=(12, 5)) for positions in slope_tables.POSITIONS}
    return slope_tables.Slopes(gradients, groups, rng.normal(size=(8, 5)) + 1, ["a"] * 4 + ["b"] * 4)


def test_slopes_are_linear_in_the_direction(slopes: slope_tables.Slopes) -> None:
    one, other = slopes.random(2, np.random.default_rng(1))
    found = slopes.of(np.stack([one, other, one + 2 * other]), "all")
    assert found.shape == (3, 12)
    np.testing.assert_allclose(found[2], found[0] + 2 * found[1])
    assert np.linalg.norm(one) == pytest.approx(1) == np.linalg.norm(slopes.true)


def test_flips_are_balanced_and_no_flip_is_the_true_vector(slopes: slope_tables.Slopes) -> None:
    signs = slopes.signs(10, np.random.default_rng(2))
    assert (signs[:, :4].sum(axis=1) == 0).all()
    assert (signs[:, 4:].sum(axis=1) == 0).all()
    np.testing.assert_allclose(slopes.relabelled(np.ones((1, 8)))[0], slopes.true)


def test_agreement_of_what_agrees() -> None:
    rows = pd.DataFrame({"draw": [0, 0, 1, 1], "measured": [1.0, 3.0, 2.0, 4.0], "linear": [1.0, 3.0, 2.0, 4.0]})
    found = slope_tables.agreement(rows)
    assert found["directions"] == 2
    assert found["correlation of items"] == 1
    assert found["rms of their difference"] == 0


def test_a_mixed_vector_has_its_share_of_the_slope(slopes: slope_tables.Slopes) -> None:
    runs = verdict_rates.Runs(slopes, draws=4)
    kind = verdict_rates.Kind("mixed", "default", "random+flips", groups=4, per_group=3, strength=1.0)
    found, groups, nulls = runs.drawn(kind, np.random.default_rng(0))
    whole = slopes.of(slopes.true[None])[0]
    assert set(np.round(found, 9)) <= set(np.round(whole, 9))  # at full strength it is the true vector
    assert groups == [str(k // 3) for k in range(12)]
    assert {name: len(drawn) for name, drawn in nulls.items()} == {"random": 4, "shuffled": 4}
    half = runs._vector(
        verdict_rates.Kind("mixed", "default", "random", 4, 3, 0.5), np.ones(8), 0, np.random.default_rng()
    )
    assert (np.linalg.norm(half), half @ slopes.true) == pytest.approx((1, 0.5))


def test_verdicts_of_drawn_runs_are_the_packages() -> None:
    nulls = {"random": np.linspace(-1, 1, 20)}
    groups = [str(k // 3) for k in range(12)]
    for mean, verdict in ((9.0, "effect"), (0.0, "no effect")):
        figures = verdict_rates.figures_from(mean + np.tile([-0.1, 0.0, 0.1], 4), groups, nulls)
        assert verdict_rates.judge(figures, verdict_rates.SETTINGS)[0] == verdict
    assert verdict_rates.share(0, 100) == "0.0 (0.0 to 3.6)"  # Clopper and Pearson: 1 − 0.025^(1/100)


# --- the others ---------------------------------------------------------------------------------------------------


def test_students_interval_is_the_packages() -> None:
    rng = np.random.default_rng(0)
    means = interval_coverage.group_means("skewed", 6, rng)[:3]
    low, high = interval_coverage.student(means, 0.9, rng)
    for k, row in enumerate(means):
        found = cluster_t_mean(row, [str(g) for g in range(6)], level=0.9)
        assert (low[k], high[k]) == pytest.approx((found.low, found.high))
    assert all(np.isfinite(method(means, 0.95, rng)).all() for method in interval_coverage.METHODS.values())


def test_what_reference_experiments_are_asked() -> None:
    options = reference_experiments.parse(["--halves", "2", "--nulls", "1"])
    assert list(reference_experiments.asked(options)) == [
        ("sentiment", 0),
        ("half", 0),
        ("half", 1),
        ("null", 0),
        ("refusal", 0),
    ]
    with pytest.raises(SystemExit, match="--evals FOLDER"):
        list(reference_experiments.asked(reference_experiments.parse(["--kinds", "survival-instinct"])))


def test_half_of_a_vector_keeps_its_length(tiny_llama_engine: Any) -> None:
    import steerlab as sl

    options: Namespace = reference_experiments.parse(["--layers", "1"])
    exp = sl.Experiment("half", tiny_llama_engine, root=None)
    whole, *_ = reference_experiments.true(exp, "sentiment", 0, options)
    half, pairs, items = reference_experiments.half(exp, "half", 0, options)
    assert half.norm == pytest.approx(whole.norm, rel=1e-5)
    assert half.cosine(whole) == pytest.approx(0.5, abs=1e-5)
    assert half.card.method == "mean_diff", "label flips are a null for it"
    assert len(pairs) == 54
    assert len(items) == 27


def test_axbench_tables_keep_judges_apart() -> None:
    rows = pd.DataFrame(
        [
            {"judge": judge, "method": method, "concept_name": str(k), "score": score, "factor": 1.0}
            for judge, scores in (("a", (1.0, 0.5)), ("b", (0.2, 0.3)))
            for method, score in zip(("diff_mean", "random"), scores, strict=True)
            for k in range(3)
        ]
    ).assign(chosen=True, half="report", mass=1.0, concept=1.0, instruction=1.0, fluency=1.0)
    tables = tables_of(rows, ["diff_mean", "random"])
    assert tables[""][["judge", "method"]].to_numpy().tolist() == [
        ["a", "diff_mean"],
        ["a", "random"],
        ["b", "diff_mean"],
        ["b", "random"],
    ]
    assert tables[""].score.tolist() == pytest.approx([1.0, 0.5, 0.2, 0.3])
    assert tables["-pairs"].difference.tolist() == pytest.approx([0.5, -0.1])
