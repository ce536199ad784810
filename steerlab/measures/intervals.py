"""Slopes, intervals and ranks: the statistics of an effect."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats
from jaxtyping import Float


@dataclass(frozen=True)
class Interval:
    """A confidence interval.

    Attributes:
        low: lower end.
        high: upper end.
        level: nominal coverage, e.g. 0.95.
    """

    low: float
    high: float
    level: float = 0.95

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside; False when an end is NaN."""
        return self.low > 0 or self.high < 0


def least_squares_slopes(
    x: Float[np.ndarray, " doses"], y: Float[np.ndarray, "items doses"]
) -> Float[np.ndarray, " items"]:
    """Slope of each row of y over x, by least squares with an intercept.

    Raises:
        ValueError: with fewer than two different x.
    """
    if np.unique(x).size < 2:
        raise ValueError(f"A slope needs two different doses, got {x.tolist()}.")
    centred = x - x.mean()
    level = (y == y[:, :1]).all(axis=1) & np.isfinite(y[:, 0])  # rounding would leave these about 0
    return np.where(level, 0.0, y @ centred / (centred @ centred))


def least_squares_curvatures(
    x: Float[np.ndarray, " doses"], y: Float[np.ndarray, "items doses"]
) -> Float[np.ndarray, " items"]:
    """Quadratic coefficient c of each row's least-squares fit y = a + b·x + c·x².

    Raises:
        ValueError: with fewer than three different x.
    """
    if np.unique(x).size < 3:
        raise ValueError(f"A curvature needs three different doses, got {x.tolist()}.")
    scale = np.abs(x).max()  # keeps the fit well conditioned whatever the unit of x
    design = np.vander(x / scale, 3)
    return np.linalg.lstsq(design, y.T, rcond=None)[0][0] / scale**2


DRAWN_AT_ONCE = 1 << 24
"""Groups drawn at a time over all resamples, so that memory does not grow with the data."""


def cluster_bootstrap_mean(
    values: Float[np.ndarray, " items"],
    groups: Sequence[str],
    *,
    level: float = 0.95,
    n_resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the mean, resampling whole groups.

    Items of one group (one template, one speaker) are not independent; drawing groups with replacement keeps that. With
    a single group, or a missing value (NaN), no interval exists and both ends are NaN.

    Args:
        values: one value per item.
        groups: the group of each item.
        level: nominal coverage.
        n_resamples: bootstrap draws.
        seed: of the draws.

    Source:
        Davison & Hinkley 1997, section 3.8 (resampling clusters).
    """
    names, inverse = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) < 2 or np.isnan(values).any():
        return Interval(float("nan"), float("nan"), level)
    sums = np.bincount(inverse, weights=values)
    counts = np.bincount(inverse).astype(float)
    result = scipy.stats.bootstrap(
        (sums, counts),
        lambda s, n, axis=-1: s.sum(axis=axis) / n.sum(axis=axis),
        paired=True,
        vectorized=True,
        confidence_level=level,
        n_resamples=n_resamples,
        batch=max(1, DRAWN_AT_ONCE // len(names)),
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Interval(float(result.confidence_interval.low), float(result.confidence_interval.high), level)


def cluster_t_mean(values: Float[np.ndarray, " items"], groups: Sequence[str], *, level: float = 0.95) -> Interval:
    """Student's t interval of the mean of items that come in groups, with one degree of freedom less than groups.

    It covers better than a bootstrap of few groups (`docs/nulls.md` has the figures). With a single group, or a missing
    value (NaN), no interval exists and both ends are NaN.

    Args:
        values: one value per item.
        groups: the group of each item.
        level: nominal coverage.

    Source:
        Donner & Klar 2000, Design and Analysis of Cluster Randomization Trials.

    Examples:
        >>> found = cluster_t_mean(np.array([1.0, 2.0, 3.0]), ["a", "b", "c"])
        >>> round(found.low, 2), round(found.high, 2)
        (-0.48, 4.48)
    """
    error, n_groups = cluster_standard_error(values, groups)
    if np.isnan(error):
        return Interval(float("nan"), float("nan"), level)
    reach = float(scipy.stats.t.ppf((1 + level) / 2, n_groups - 1)) * error
    mean = float(np.mean(values))
    return Interval(mean - reach, mean + reach, level)


def cluster_standard_error(values: Float[np.ndarray, " items"], groups: Sequence[str]) -> tuple[float, int]:
    """Standard error of the mean of items that come in groups, by leaving out one group at a time; and their number.

    With groups of one size it is the standard deviation of the groups' means over the root of their number. NaN for a
    single group or a missing value.

    Source:
        Efron 1982, The Jackknife, chapter 3; MacKinnon, Nielsen & Webb 2023 (CV3) for clusters.
    """
    names, inverse = np.unique(np.asarray(groups), return_inverse=True)
    n_groups = len(names)
    if n_groups < 2 or np.isnan(values).any():
        return float("nan"), n_groups
    sums, counts = np.bincount(inverse, weights=values), np.bincount(inverse)
    without = (sums.sum() - sums) / (counts.sum() - counts)
    return float(np.sqrt((n_groups - 1) / n_groups * np.sum((without - without.mean()) ** 2))), n_groups


def null_rank(effect: float, nulls: Float[np.ndarray, " draws"]) -> float:
    """P = (1 + #{|null| ≥ |effect|}) / (1 + draws): the share of null draws at least as large, the effect counted in.

    NaN without draws. Source: Phipson & Smyth 2010 (why the +1).

    Examples:
        >>> null_rank(5.0, np.array([1.0, -2.0, 7.0]))
        0.5
    """
    if nulls.size == 0:
        return float("nan")
    return float((1 + np.sum(np.abs(nulls) >= abs(effect))) / (1 + nulls.size))


def rank_floor(n_draws: int) -> float:
    """The smallest rank that n draws can give."""
    return 1 / (1 + n_draws)


def holm(ranks: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of several p values (here: null ranks), in the order given.

    The k-th smallest of m is multiplied by m − k + 1, capped at 1, and never smaller than the adjusted value before it;
    comparing the result with a level α bounds the chance of any false claim among the m by α. A missing value stays
    missing and is not counted.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    values = np.asarray(ranks, dtype=float)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    values[order] = np.maximum.accumulate(np.minimum(1.0, values[order] * factors))
    return values.tolist()


def false_discovery(ranks: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's adjustment of several p values (here: null ranks), in the order given.

    Comparing the result with a level α bounds the expected share of false claims among all claims by α, where `holm`
    bounds the chance of any. It holds for independent p values and for positively dependent ones. A missing value stays
    missing and is not counted.

    Source: Benjamini & Hochberg 1995, Controlling the false discovery rate.

    Examples:
        >>> [round(value, 3) for value in false_discovery([0.01, 0.04, 0.03])]
        [0.03, 0.04, 0.04]
    """
    values = np.asarray(ranks, dtype=float)
    known = ~np.isnan(values)
    if known.any():
        values[known] = scipy.stats.false_discovery_control(values[known], method="bh")
    return values.tolist()
