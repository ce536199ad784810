"""What a design could have found: against simulated runs, and what must hold for any design."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from steerlab.measures import Design, NullDraws


def share_found(slope: float, design: Design, rng: np.random.Generator, runs: int) -> float:
    """Simulated runs: groups' means and control slopes drawn, and the verdict's two conditions on them."""
    groups = slope + design.standard_error * design.groups**0.5 * rng.standard_normal((runs, design.groups))
    found = scipy.stats.ttest_1samp(groups, 0, axis=1).pvalue < design.level
    for family in design.families.values():
        nulls = family.spread * rng.standard_normal((runs, family.draws))
        larger = (np.abs(nulls) >= np.abs(groups.mean(1))[:, None]).sum(1)
        found &= (1 + larger) / (1 + family.draws) <= design.level
    return found.mean()


@pytest.mark.parametrize(
    "design",
    [
        Design(0.5, 9, {"random": NullDraws(20, 2.0)}),
        Design(2.0, 4, {"random": NullDraws(19, 1.0), "shuffled": NullDraws(40, 2.0)}),
    ],
)
def test_power_is_the_share_of_simulated_runs_that_find_it(design: Design) -> None:
    rng = np.random.default_rng(0)
    for share in (0.5, 1.0):
        slope = share * design.detectable()
        assert share_found(slope, design, rng, 4000) == pytest.approx(design.power(slope), abs=0.025), share
    assert design.power(design.detectable()) == pytest.approx(0.8, abs=0.005)


def test_a_rank_among_fresh_draws_worked_by_hand() -> None:
    """19 draws: none may be larger. 39 draws: one may."""
    p = 2 * scipy.stats.norm.sf(1.5)
    assert NullDraws(19, 2.0).beaten(np.array([3.0]), 0.05) == pytest.approx((1 - p) ** 19)
    assert NullDraws(39, 2.0).beaten(np.array([3.0]), 0.05) == pytest.approx((1 - p) ** 39 + 39 * p * (1 - p) ** 38)
    assert NullDraws(18, 2.0).beaten(np.array([1e9]), 0.05) == 0, "18 draws never rank low enough"
    assert NullDraws.of(np.array([3.0, -4.0])).spread == pytest.approx(12.5**0.5)


def test_without_nulls_it_is_the_power_of_a_t_test() -> None:
    design = Design(1.0, 6, {})
    cut, away = scipy.stats.t.ppf(0.975, 5), 3.0
    expected = scipy.stats.nct.sf(cut, 5, away) + scipy.stats.nct.cdf(-cut, 5, away)
    assert design.power(away) == pytest.approx(expected, abs=0.005)
    assert design.power(0.0) == pytest.approx(0.05, abs=0.002)


@settings(max_examples=40)
@given(
    error=st.floats(0.01, 10),
    groups=st.integers(2, 40),
    draws=st.integers(19, 60),
    spread=st.floats(0.01, 10),
    slope=st.floats(0, 30),
)
def test_larger_slopes_are_found_more_often_and_more_groups_help_what_is_mostly_found(
    error: float, groups: int, draws: int, spread: float, slope: float
) -> None:
    design = Design(error, groups, {"random": NullDraws(draws, spread)})
    power = design.power(slope)
    assert 0 <= power <= 1
    assert design.power(-slope) == pytest.approx(power, abs=1e-9)
    assert design.power(1.5 * slope + 0.1) >= power - 1e-3
    if power > 0.5:  # where a slope is found by luck, less spread means less luck
        assert design.with_groups(4 * groups).power(slope) >= power - 0.01


def test_groups_needed_give_the_power_and_one_fewer_does_not() -> None:
    design = Design(1.0, 5, {"random": NullDraws(20, 1.0)})
    needed = design.groups_for(3.0)
    assert design.with_groups(int(needed)).power(3.0) >= 0.8 > design.with_groups(int(needed) - 1).power(3.0)
    assert math.isinf(design.groups_for(1.0)), "random directions alone reach that far"


def test_what_no_design_finds_is_infinite() -> None:
    assert math.isinf(Design(1.0, 9, {"random": NullDraws(5, 1.0)}).detectable())
    assert math.isinf(Design(math.nan, 1, {"random": NullDraws(20, 1.0)}).detectable())
    assert Design(0.0, 9, {"random": NullDraws(20, 0.0)}).detectable() == 0
