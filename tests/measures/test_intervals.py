import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from steerlab.measures import (
    Interval,
    cluster_bootstrap_mean,
    cluster_standard_error,
    cluster_t_mean,
    false_discovery,
    holm,
    least_squares_curvatures,
    least_squares_slopes,
    null_rank,
    rank_floor,
)

# --- slopes -------------------------------------------------------------------------------------------------------


def test_slopes_equal_scipy_for_uneven_doses():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=7), rng.normal(size=(5, 7))
    expected = [scipy.stats.linregress(x, row).slope for row in y]
    assert np.allclose(least_squares_slopes(x, y), expected)
    assert (least_squares_slopes(x, np.full((3, len(x)), 0.1 + y[0, 0])) == 0).all()


@pytest.mark.parametrize("x", [[0.3], [0.2, 0.2, 0.2]])
def test_one_dose_gives_no_slope(x):
    with pytest.raises(ValueError, match="two different doses"):
        least_squares_slopes(np.array(x), np.zeros((2, len(x))))


# --- curvatures ---------------------------------------------------------------------------------------------------


def test_curvatures_equal_numpy_for_uneven_doses():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=7), rng.normal(size=(5, 7))
    assert np.allclose(least_squares_curvatures(x, y), np.polyfit(x, y.T, 2)[0])
    assert np.allclose(least_squares_curvatures(1e-4 * x, y), 1e8 * np.polyfit(x, y.T, 2)[0])


def test_two_doses_give_no_curvature():
    with pytest.raises(ValueError, match="three different doses"):
        least_squares_curvatures(np.array([0.0, 0.1, 0.1]), np.zeros((2, 3)))


# --- intervals ----------------------------------------------------------------------------------------------------


def test_bootstrap_resamples_whole_groups():
    # Groups a (two items, sum 6) and b (one item, 0): the mean of a resample of two groups is 3, 2 or 0, with
    # probabilities 1/4, 1/2, 1/4. The 95 % percentile interval is therefore exactly [0, 3].
    interval = cluster_bootstrap_mean(np.array([2.0, 4.0, 0.0]), ["a", "a", "b"])
    assert (interval.low, interval.high) == (0, 3)
    # At a level of 40 % both ends fall into the middle half.
    middle = cluster_bootstrap_mean(np.array([2.0, 4.0, 0.0]), ["a", "a", "b"], level=0.4)
    assert (middle.low, middle.high, middle.level) == (2, 2, 0.4)


def test_bootstrap_repeats_and_takes_any_group_order():
    values, groups = np.arange(6.0), list("abcabc")
    assert cluster_bootstrap_mean(values, groups, seed=1) == cluster_bootstrap_mean(values, groups, seed=1)
    order = [5, 3, 1, 0, 2, 4]
    assert cluster_bootstrap_mean(values[order], [groups[i] for i in order], seed=1) == cluster_bootstrap_mean(
        values, groups, seed=1
    )


def test_one_group_has_no_interval():
    interval = cluster_bootstrap_mean(np.arange(5.0), ["a"] * 5)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)
    assert not interval.excludes_zero


def test_missing_values_stay_missing():
    interval = cluster_bootstrap_mean(np.array([1.0, np.nan, 2.0]), list("abc"))
    assert not interval.excludes_zero


def test_excludes_zero():
    assert Interval(0.1, 0.2).excludes_zero
    assert Interval(-0.2, -0.1).excludes_zero
    assert not Interval(-0.1, 0.1).excludes_zero
    assert not Interval(0.0, 0.1).excludes_zero


# --- ranks --------------------------------------------------------------------------------------------------------


def test_null_rank_counts_both_signs_and_ties():
    nulls = np.array([1.0, -2.0, 7.0])
    assert null_rank(5.0, nulls) == 0.5
    assert null_rank(-5.0, nulls) == 0.5
    assert null_rank(2.0, nulls) == 0.75
    assert null_rank(10.0, nulls) == 0.25


def test_null_rank_without_draws_is_missing():
    assert math.isnan(null_rank(1.0, np.array([])))


def test_twenty_draws_cannot_go_below_their_floor():
    assert null_rank(99.0, np.zeros(20)) == rank_floor(20) == pytest.approx(0.0476, abs=1e-4)


@given(st.floats(-10, 10), st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_null_rank_bounds(effect, nulls):
    assert rank_floor(len(nulls)) <= null_rank(effect, np.array(nulls)) <= 1


# --- several comparisons ------------------------------------------------------------------------------------------


def test_holm_worked_by_hand():
    # Sorted: 0.01 × 4, 0.02 × 3, 0.03 × 2 = 0.06, 0.5 × 1; a step never goes below the one before.
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.04, 0.05]) == pytest.approx([0.08, 0.08])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]


def test_holm_leaves_missing_ranks_missing_and_does_not_count_them():
    adjusted = holm([0.03, float("nan"), 0.02])
    assert math.isnan(adjusted[1])
    assert [adjusted[0], adjusted[2]] == pytest.approx([0.04, 0.04])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(ranks, level):
    order = sorted(range(len(ranks)), key=lambda k: ranks[k])
    rejected = set()
    for step, index in enumerate(order):
        if ranks[index] * (len(ranks) - step) > level:
            break
        rejected.add(index)
    assert {k for k, adjusted in enumerate(holm(ranks)) if adjusted <= level} == rejected


# --- Student's t over groups --------------------------------------------------------------------------------------


def test_of_groups_alike_in_size_it_is_students_interval_of_their_means():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 3))
    found = cluster_t_mean(values.ravel(), [str(g) for g in range(6) for _ in range(3)], level=0.9)
    expected = scipy.stats.ttest_1samp(values.mean(1), 0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_the_error_of_uneven_groups_worked_by_hand():
    """Groups {1, 3} and {5}: without one the mean is 5, without the other 2; √(½·(1.5² + 1.5²)) = 1.5."""
    error, groups = cluster_standard_error(np.array([1.0, 3.0, 5.0]), ["a", "a", "b"])
    assert (error, groups) == (pytest.approx(1.5), 2)


def test_one_group_or_a_missing_value_has_no_interval():
    for values, groups in (([1.0, 2.0], ["a", "a"]), ([1.0, np.nan], ["a", "b"])):
        found = cluster_t_mean(np.array(values), groups)
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def test_it_covers_where_a_bootstrap_of_four_groups_does_not():
    rng = np.random.default_rng(0)
    groups = [str(g) for g in range(4) for _ in range(3)]
    covered = {"t": 0, "bootstrap": 0}
    for _ in range(200):
        values = np.repeat(rng.standard_normal(4), 3) + rng.standard_normal(12)
        t, bootstrap = cluster_t_mean(values, groups), cluster_bootstrap_mean(values, groups, n_resamples=200)
        covered["t"] += t.low <= 0 <= t.high
        covered["bootstrap"] += bootstrap.low <= 0 <= bootstrap.high
    assert scipy.stats.binomtest(covered["t"], 200, 0.95).pvalue > 0.01
    assert covered["bootstrap"] < 180


# --- false discovery ----------------------------------------------------------------------------------------------


def test_false_discovery_worked_by_hand():
    """Sorted 0.01, 0.03, 0.04 times 3/1, 3/2, 3/3: 0.03, 0.045, 0.04; from the right the least so far."""
    assert false_discovery([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.04, 0.04])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_false_discovery_is_between_a_rank_and_holm(ranks):
    found = false_discovery(ranks)
    assert all(rank - 1e-12 <= one <= two + 1e-12 for rank, one, two in zip(ranks, found, holm(ranks), strict=True))


def test_a_missing_rank_is_not_counted():
    found = false_discovery([0.01, math.nan, 0.04])
    assert found[0] == pytest.approx(0.02)
    assert math.isnan(found[1])
    assert found[2] == pytest.approx(0.04)
