import math
from dataclasses import replace

import pytest

from steerlab.experiment.measurements.effect._comparisons import with_comparisons
from steerlab.experiment.measurements.effect.result import Effect
from tests.experiment.frames import make_effect

NULLS = [0.1] * 19


def of_plan(plan: str, slopes: list[float], targets: str = "t", nulls: list[float] = NULLS) -> Effect:
    effect = make_effect(slopes, nulls={"random": nulls} if nulls else None)
    return replace(effect, plan_hash=plan, provenance={"targets_hash": targets})


def test_a_plan_alone_is_not_adjusted() -> None:
    (effect,) = with_comparisons([of_plan("a", [2.0, 3.0])])
    assert effect.comparisons is None
    assert effect.adjusted_rank == effect.null_rank == pytest.approx(1 / 20)
    assert effect.summary()["n_tested"] == 1
    assert not any("plans were tested" in reason for reason in effect.reasons)


def test_several_plans_on_the_same_items_are_adjusted_by_holm() -> None:
    close = [4.0, 3.0, *[0.1] * 17]  # the slope 2.55 is beyond all of 19 draws but two
    first, second, third = with_comparisons(
        [of_plan("a", [2.5, 2.6]), of_plan("b", [2.5, 2.6], nulls=close), of_plan("c", [2.5, 2.6], nulls=[])]
    )
    assert first.adjusted_rank == pytest.approx(2 * 1 / 20), "the plan without nulls has no rank and is not counted"
    assert second.adjusted_rank == pytest.approx(3 / 20)
    assert math.isnan(third.adjusted_rank)
    assert {effect.summary()["n_tested"] for effect in (first, second, third)} == {3}
    assert first.reasons[-1].startswith("3 plans were tested on these items")
    assert "0.100, not within 0.05" in first.reasons[-1]
    assert "no null rank to adjust" in third.reasons[-1]
    assert first.verdict == "effect", "the note does not change the verdict"


def test_a_rank_may_survive_the_adjustment() -> None:
    many = [0.1] * 99
    first, _ = with_comparisons([of_plan("a", [2.0, 3.0], nulls=many), of_plan("b", [0.01, 0.05], nulls=many)])
    assert first.adjusted_rank == pytest.approx(0.02)
    assert "0.020, within 0.05" in first.reasons[-1]


def test_other_items_and_metrics_are_another_family() -> None:
    other_metric = of_plan("c", [2.0, 3.0])
    other_metric = replace(other_metric, settings=replace(other_metric.settings, metric_identity="choice_prob"))
    effects = with_comparisons([of_plan("a", [2.0, 3.0]), of_plan("b", [2.0, 3.0], targets="u"), other_metric])
    assert [effect.comparisons for effect in effects] == [None, None, None]


def test_a_plan_measured_again_counts_once() -> None:
    effects = with_comparisons([of_plan("a", [2.0, 3.0]), of_plan("a", [2.0, 3.1]), of_plan("b", [2.0, 3.0])])
    assert [effect.summary()["n_tested"] for effect in effects] == [2, 2, 2]
    assert effects[0].adjusted_rank == pytest.approx(2 / 20)


def test_a_false_discovery_rate_is_an_option_and_is_named() -> None:
    plans = [of_plan("a", [2.5, 2.6]), of_plan("b", [2.5, 2.6]), of_plan("c", [0.01, 0.02])]
    holm, fdr = (
        with_comparisons([replace(one, settings=replace(one.settings, adjustment=way)) for one in plans])[0]
        for way in ("holm", "fdr")
    )
    assert holm.adjusted_rank == pytest.approx(3 / 20)
    assert fdr.adjusted_rank == pytest.approx(3 / 2 / 20), "two of three have this rank"
    assert fdr.comparisons is not None
    assert fdr.comparisons.adjustment == "fdr"
    assert "Benjamini and Hochberg's adjustment makes its rank 0.075" in fdr.reasons[-1]
