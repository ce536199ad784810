"""How often intervals of a mean over groups cover it: percentile, BCa and studentised bootstrap, and Student's t.

    python benchmarks/interval_coverage.py

Items of known mean 0 come in groups: a group's share plus an item's own, three items a group, each share normal,
exponential (skewed) or Student's t with three degrees of freedom (heavy tails). With items of equal groups, the mean of
items is the mean of the groups' means, which the methods are given. Each figure is the share of simulated data sets
whose interval covers 0, with the median width.
"""

import argparse
import itertools
from collections.abc import Callable

import numpy as np
import scipy.stats

SETS, RESAMPLES, PER_GROUP = 1000, 999, 3
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape) - 1,
    "heavy": lambda rng, shape: rng.standard_t(3, size=shape),
}


def group_means(kind: str, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Means of the groups of each data set, [sets, groups]."""
    draw = DRAWS[kind]
    return (draw(rng, (SETS, groups, 1)) + draw(rng, (SETS, groups, PER_GROUP))).mean(axis=-1)


def percentile(means: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Quantiles of resampled means: ends [2, sets]."""
    drawn = means[:, rng.integers(means.shape[1], size=(RESAMPLES, means.shape[1]))].mean(axis=-1)
    return np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=1)


def bca(means: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Bias-corrected and accelerated, by SciPy."""
    options = {"axis": -1, "vectorized": True, "n_resamples": RESAMPLES, "batch": 100, "rng": rng}
    found = scipy.stats.bootstrap((means,), np.mean, confidence_level=level, method="BCa", **options)
    return np.array([found.confidence_interval.low, found.confidence_interval.high])


def studentised(means: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Quantiles of each resample's own t; resamples of one group alone count as 0."""
    drawn = means[:, rng.integers(means.shape[1], size=(RESAMPLES, means.shape[1]))]
    error = drawn.std(axis=-1, ddof=1) / means.shape[1] ** 0.5
    away = drawn.mean(axis=-1) - means.mean(axis=-1, keepdims=True)
    t = np.divide(away, error, out=np.where(away == 0, 0.0, np.copysign(np.inf, away)), where=error > 0)
    low, high = np.quantile(t, [(1 - level) / 2, (1 + level) / 2], axis=1)
    own = means.std(axis=-1, ddof=1) / means.shape[1] ** 0.5
    return np.array([means.mean(axis=-1) - high * own, means.mean(axis=-1) - low * own])


def student(means: np.ndarray, level: float, _rng: np.random.Generator) -> np.ndarray:
    """Student's t, as `steerlab.measures.cluster_t_mean` for groups of one size."""
    reach = scipy.stats.t.ppf((1 + level) / 2, means.shape[1] - 1) * means.std(axis=-1, ddof=1) / means.shape[1] ** 0.5
    return np.array([means.mean(axis=-1) - reach, means.mean(axis=-1) + reach])


METHODS = {"percentile": percentile, "BCa": bca, "studentised": studentised, "Student's t": student}


def main() -> None:
    """Prints the table of docs/nulls.md."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    print("| items | groups | " + " | ".join(METHODS) + " |\n" + "| --- " * (2 + len(METHODS)) + "|")
    for kind, groups in itertools.product(DRAWS, (4, 9, 20)):
        means, cells = group_means(kind, groups, rng), []
        for method in METHODS.values():
            ends = [method(means, level, rng) for level in (0.95, 0.9)]
            wide, narrow = (f"{100 * np.mean((low <= 0) & (high >= 0)):.0f}" for low, high in ends)
            cells.append(f"{wide} / {narrow} ({np.median(ends[0][1] - ends[0][0]):.1f})")
        print(f"| {kind} | {groups} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
