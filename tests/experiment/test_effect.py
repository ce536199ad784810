import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from steerlab.experiment.measurements.effect._figures import _null_slopes
from steerlab.experiment.measurements.effect.result import Effect
from tests.experiment.frames import DOSES, make_effect


def test_slopes_are_those_of_the_items() -> None:
    effect = make_effect([2.0, 4.0, -1.0])
    assert effect.item_slopes.slope.to_numpy() == pytest.approx([2.0, 4.0, -1.0])
    assert effect.slope == pytest.approx(5 / 3)
    assert effect.anti_steerable == pytest.approx(1 / 3)


def test_slopes_of_control_draws_are_those_of_their_tables() -> None:
    """Some arms have a dose 0 of their own; the order of rows says nothing."""
    rng = np.random.default_rng(0)
    arms = [
        ("vector", 0, (0, 1, 2)),
        *(("random", k, (0, 2) if k % 2 else (2,)) for k in range(4)),
        ("shuffled", 0, (2,)),
    ]
    rows = [(f, k, dose, item, rng.normal()) for f, k, doses in arms for dose in doses for item in range(5)]
    frame = pd.DataFrame(rows, columns=["family", "draw", "dose", "item", "value"]).sample(frac=1, random_state=1)
    found, own = _null_slopes(frame, [0, 1, 2])
    by_item = {key: rows.set_index("item").value for key, rows in frame.groupby(["family", "draw", "dose"])}
    wanted = {
        (family, k): ((by_item[family, k, 2] - by_item.get((family, k, 0), by_item["vector", 0, 0])) / 2).mean()
        for family, k, _ in arms
    }
    assert own == pytest.approx(wanted.pop(("vector", 0)), rel=1e-12)
    assert {(row.family, row.draw): row.slope for row in found.itertuples()} == pytest.approx(wanted, rel=1e-12)


def test_an_effect_needs_interval_and_every_rank() -> None:
    small = list(np.linspace(-1, 1, 20))
    effect = make_effect([9.0, 10.0, 11.0, 10.5], nulls={"random": small, "shuffled": small})
    assert effect.verdict == "effect"
    assert effect.null_ranks == {"random": pytest.approx(1 / 21), "shuffled": pytest.approx(1 / 21)}
    assert effect.null_rank == pytest.approx(1 / 21)
    assert effect.ci[0] <= effect.slope <= effect.ci[1]


def test_an_interval_that_excludes_zero_is_not_enough() -> None:
    large = [12.0, *np.linspace(-1, 1, 19)]
    effect = make_effect([9.0, 10.0, 11.0, 10.5], nulls={"random": large})
    assert effect.ci[0] > 0
    assert effect.null_ranks["random"] == pytest.approx(2 / 21)
    assert effect.verdict == "inconclusive"


def test_one_family_that_matches_the_vector_decides() -> None:
    small, large = list(np.linspace(-1, 1, 20)), [-30.0, *np.linspace(-1, 1, 19)]
    effect = make_effect([9.0, 10.0, 11.0], nulls={"random": small, "shuffled": large})
    assert effect.verdict == "inconclusive"
    assert effect.null_rank == effect.null_ranks["shuffled"]


def test_ranks_that_cannot_reach_the_level_are_inconclusive_and_say_so() -> None:
    effect = make_effect([9.0, 10.0, 11.0], nulls={"random": [0.1] * 5})
    assert effect.null_ranks["random"] == pytest.approx(1 / 6)
    assert effect.verdict == "inconclusive"
    assert any("at least 19" in reason for reason in effect.reasons)
    assert math.isinf(effect.detectable), "no slope of any size could have been found"


def test_without_nulls_nothing_is_claimed() -> None:
    effect = make_effect([9.0, 10.0, 11.0])
    assert effect.verdict == "not tested"
    assert math.isnan(effect.null_rank)
    assert any("No null family" in reason for reason in effect.reasons)


def test_a_missing_baseline_is_told_of() -> None:
    effect = make_effect([9.0, 10.0, 11.0])
    assert not any("Dose 0" in reason for reason in effect.reasons)
    rows, cost = effect.rows[effect.rows.dose != 0], effect.cost[effect.cost.dose != 0]
    without = Effect(rows, cost, "hash", "plan", effect.settings)
    assert any("Dose 0 was not among the doses" in reason for reason in without.reasons)


def test_few_groups_are_told_of() -> None:
    nulls = {"random": list(np.linspace(-1, 1, 20))}
    few, enough = make_effect([9.0, 10.0] * 2, nulls=nulls), make_effect([9.0, 10.0] * 5, nulls=nulls)
    assert any("rests on 4 groups" in reason for reason in few.reasons)
    assert not any("rests on" in reason for reason in enough.reasons)
    assert few.verdict == enough.verdict == "effect", "no part of the verdict"


@pytest.mark.parametrize(
    ("families", "from_pairs", "told"),
    [
        (["random"], True, True),
        (["random"], False, False),
        (["random", "shuffled"], True, False),
        (["shuffled"], True, False),
        ([], True, False),
    ],
)
def test_random_directions_alone_leave_the_labels_unasked(families: list[str], from_pairs: bool, told: bool) -> None:
    effect = make_effect([9.0, 10.0, 11.0, 10.5], nulls={name: list(np.linspace(-1, 1, 20)) for name in families})
    asked = replace(effect, provenance={"from_pairs": from_pairs})
    assert any("Only random directions were asked" in reason for reason in asked.reasons) == told
    assert asked.verdict == effect.verdict == ("effect" if families else "not tested"), "no part of the verdict"


def test_an_interval_around_zero_is_no_effect_only_if_it_is_narrow() -> None:
    effect = make_effect([10.0, -9.0, 8.0, -7.0], nulls={"random": [0.0] * 20})
    assert effect.ci[0] < 0 < effect.ci[1]
    assert effect.verdict == "inconclusive"
    assert make_effect([1.0, -0.9, 0.8, -0.7], nulls={"random": [3.0] * 20}).verdict == "no effect"


def test_a_plan_that_does_nothing_has_no_effect() -> None:
    effect = make_effect([0.0] * 4, nulls={"random": [0.0] * 20})
    assert effect.verdict == "no effect"
    assert "the plan edits nothing that reaches the metric" in effect.reasons[-2]  # before the caution of few groups
    assert not any("±" in reason for reason in effect.reasons)
    still = make_effect([0.0] * 4, nulls={"random": [1.0] * 20})
    assert still.verdict == "no effect", "controls move the items, the vector does not"
    assert any("lies inside ±1.00" in reason for reason in still.reasons)


def test_costly_doses_enter_no_fit() -> None:
    effect = make_effect([2.0, 3.0], ratios={0.2: 1.6})
    assert effect.fitted_doses == DOSES[:-1]
    assert effect.slope == pytest.approx(2.5)


def test_fewer_than_three_affordable_doses_is_collapse() -> None:
    effect = make_effect([2.0, 3.0], ratios={-0.2: 9.0, -0.1: 2.0, 0.2: 1.51}, nulls={"random": [0.0] * 20})
    assert effect.fitted_doses == [0.0, 0.1]
    assert effect.verdict == "collapsed"
    assert "smaller doses" in effect.reasons[0]


def test_the_bound_itself_is_affordable() -> None:
    assert make_effect([2.0, 3.0], ratios={0.2: 1.5}).fitted_doses == DOSES


def test_no_affordable_dose_gives_nan_not_zero() -> None:
    effect = make_effect([2.0, 3.0], ratios=dict.fromkeys(DOSES, 2.0))
    assert effect.verdict == "collapsed"
    assert math.isnan(effect.slope)
    assert math.isnan(effect.anti_steerable)
    assert math.isnan(effect.ci[0])


def test_one_group_has_no_interval() -> None:
    effect = make_effect([2.0, 3.0], groups=["a", "a"], nulls={"random": [0.0] * 20})
    assert math.isnan(effect.ci[0])
    assert effect.verdict == "inconclusive"


def test_items_of_one_group_are_resampled_together() -> None:
    slopes = [1.0] * 10 + [5.0] * 10
    apart = make_effect(slopes)
    together = make_effect(slopes, groups=["a"] * 10 + ["b"] * 10)
    assert together.ci[1] - together.ci[0] > 2 * (apart.ci[1] - apart.ci[0])


def test_summary_is_plain_data() -> None:
    summary = bent([3.0, 5.0], ratios={0.2: 2.0}, nulls={"random": [0.0] * 20}).summary()
    assert summary["n_items"] == 2
    assert summary["verdict"] == "effect"
    assert summary["settings"]["max_ppl_ratio"] == 1.5
    assert summary["curvature"] == pytest.approx(4.0)
    assert summary["collapse_dose"] == 0.2
    assert len(summary["curvature_ci"]) == 2


# --- curvature and collapse ---------------------------------------------------------------------------------------


def bent(curvatures: list[float], **options: Any) -> Effect:
    """An effect whose items respond with 2·dose + c·dose²."""
    effect = make_effect([2.0] * len(curvatures), **options)
    rows = effect.rows
    value = rows.value + np.array(curvatures)[rows.item] * rows.dose**2
    return replace(effect, rows=rows.assign(value=value))


def test_curvature_is_the_mean_quadratic_coefficient() -> None:
    effect = bent([3.0, 5.0, -2.0])
    assert effect.curvature == pytest.approx(2.0)
    assert effect.slope == pytest.approx(2.0), "the doses are symmetric"
    reach = 4.302653 * np.std([3, 5, -2], ddof=1) / 3**0.5  # Student's t for two degrees of freedom, at 97.5 %
    assert effect.curvature_ci == pytest.approx((2 - reach, 2 + reach))
    assert bent([3.0, 3.0]).curvature_ci == pytest.approx((3.0, 3.0))


def test_curvature_needs_three_fitted_doses_and_leaves_out_the_others() -> None:
    assert math.isnan(bent([1.0, 2.0], ratios={-0.2: 9.0, -0.1: 9.0, 0.2: 9.0}).curvature)
    effect = bent([4.0, 4.0], ratios={0.2: 9.0})
    spoilt = effect.rows.assign(value=effect.rows.value.where(effect.rows.dose != 0.2, 1e3))
    assert replace(effect, rows=spoilt).curvature == pytest.approx(4.0)


def test_collapse_dose_is_the_smallest_costly_one() -> None:
    assert math.isnan(make_effect([2.0, 3.0]).collapse_dose)
    assert make_effect([2.0, 3.0], ratios={-0.2: 1.6, 0.2: 1.6, -0.1: 1.51}).collapse_dose == 0.1
    assert make_effect([2.0, 3.0], ratios={0.2: 1.6, 0.1: 1.5}).collapse_dose == 0.2, "the bound itself is allowed"


# --- being small, and what could have been seen -------------------------------------------------------------------

WIDE = list(np.linspace(-10, 10, 21))  # 95 % of sizes stay below 10, the largest two apart by nothing
ITEMS = [0.5, -0.4, 0.3, -0.2, 0.1, 0.6]


def test_the_margin_is_the_95_percent_quantile_of_random_slopes() -> None:
    effect = make_effect(ITEMS, nulls={"random": WIDE, "shuffled": [99.0] * 20})
    assert effect.margin == pytest.approx(np.quantile(np.abs(WIDE), 0.95))
    assert effect.verdict == "no effect"
    assert any(f"inside ±{effect.margin:.2f}" in reason for reason in effect.reasons)


def test_a_smallest_slope_that_matters_is_the_margin() -> None:
    effect = make_effect(ITEMS, nulls={"random": WIDE}, smallest=0.2)
    assert effect.margin == 0.2
    assert effect.verdict == "inconclusive"
    assert any("reaches outside ±0.20, the smallest slope that matters" in reason for reason in effect.reasons)


def test_the_equivalence_interval_is_two_one_sided_tests() -> None:
    """It lies inside ±m just where Student's test rejects both −m and m, one-sided, at 5 %."""
    effect = make_effect(ITEMS, nulls={"random": WIDE})
    for margin in (0.3, 0.45, 0.5, 0.7):
        above = scipy.stats.ttest_1samp(ITEMS, -margin, alternative="greater").pvalue
        below = scipy.stats.ttest_1samp(ITEMS, margin, alternative="less").pvalue
        low, high = effect.equivalence_ci
        assert (-margin < low and high < margin) == (max(above, below) < 0.05), margin
    assert effect.ci[0] < effect.equivalence_ci[0] < effect.equivalence_ci[1] < effect.ci[1]


def test_an_effect_smaller_than_what_matters_is_inconclusive_and_says_both() -> None:
    effect = make_effect([2.0, 2.1, 1.9, 2.0], nulls={"random": list(np.linspace(-1, 1, 20))}, smallest=5.0)
    assert effect.verdict == "inconclusive"
    assert any("beyond its nulls, and by less" in reason for reason in effect.reasons)


def test_without_random_directions_or_a_smallest_nothing_is_shown_to_be_small() -> None:
    effect = make_effect(ITEMS, nulls={"shuffled": WIDE})
    assert math.isnan(effect.margin)
    assert effect.verdict == "inconclusive"
    assert any("no smallest= was given" in reason for reason in effect.reasons)


def test_inconclusive_says_what_could_have_been_seen_and_what_it_takes() -> None:
    nulls = {"random": list(np.linspace(-1, 1, 20))}
    slopes = [4.0, -2.0, 5.0, -1.0, 3.0, -3.0]
    effect = make_effect(slopes, nulls=nulls, smallest=2.0)
    assert effect.verdict == "inconclusive"
    assert effect.detectable > effect.ci[1] - effect.slope, "more than the interval reaches"
    assert any(f"finds a slope of {effect.detectable:.2f} in 80 %" in reason for reason in effect.reasons)
    assert effect.needed_groups > 6
    assert effect.needed_items == effect.needed_groups, "a group an item"
    assert any(f"takes {effect.needed_groups:.0f} groups" in reason for reason in effect.reasons)
    more = make_effect(slopes * 8, nulls=nulls, smallest=2.0)
    assert more.detectable < effect.detectable / 2
    assert abs(more.needed_groups - effect.needed_groups) < 0.3 * effect.needed_groups, "much the same spread"
    assert math.isinf(make_effect(slopes, nulls=nulls, smallest=0.1).needed_groups), "the nulls themselves reach 0.1"


def test_sizes_are_told_in_units_of_items_and_of_nulls() -> None:
    effect = make_effect([4.0, 6.0, 8.0], nulls={"random": [1.0, -2.0, 3.0], "shuffled": [-4.0] * 3})
    assert effect.size_over_items == pytest.approx(6 / 2)
    assert effect.size_over_nulls == pytest.approx(6 / 4), "the family that reaches farther counts"
    assert math.isnan(make_effect([4.0, 4.0]).size_over_items)
    assert math.isnan(make_effect([4.0, 5.0]).size_over_nulls)


def test_an_earlier_rule_keeps_its_verdict_and_is_named() -> None:
    effect = make_effect([10.0, -9.0, 8.0, -7.0], nulls={"random": [0.1] * 20}, rule=1)
    assert effect.verdict == "no effect"
    assert any("judged by rule 1" in reason and "is inconclusive" in reason for reason in effect.reasons)
    present = make_effect([10.0, -9.0, 8.0, -7.0], nulls={"random": [0.1] * 20})
    assert not any("rule 1" in reason for reason in present.reasons)
    assert present.ci[1] > effect.ci[1], "a percentile interval of four groups is too narrow"


def test_small_slopes_are_told_with_digits() -> None:
    """A choice's probability changes by little per unit of dose; ±0.00 would say nothing."""
    effect = make_effect([0.001 * item for item in ITEMS], nulls={"random": [0.001 * slope for slope in WIDE]})
    margin = f"{effect.margin:.2g}"
    assert 0 < float(margin) < 0.1
    assert any(f"±{margin}, " in reason for reason in effect.reasons)
    assert f"{effect.ci[0]:+.2g}" in str(effect)
    assert "0.00]" not in " ".join([str(effect), *effect.reasons])
