"""Runs of positions: half-open intervals, as plans, receipts and workers hold them."""

from collections.abc import Iterable, Sequence

import numpy as np

Runs = tuple[tuple[int, int], ...]
"""Positions as half-open intervals, in order and apart from each other."""


def runs_of(mask: Sequence[bool] | np.ndarray) -> Runs:
    """The positions at which a mask is true.

    Examples:
        >>> runs_of([False, True, True, False, True])
        ((1, 3), (4, 5))
    """
    framed = np.zeros(len(mask) + 2, dtype=bool)
    framed[1:-1] = mask
    (bounds,) = np.nonzero(framed[1:] != framed[:-1])
    return runs_between(bounds.tolist())


def clip(runs: Iterable[tuple[int, int]], start: int, stop: int) -> Runs:
    """The part of the runs inside start ≤ p < stop."""
    cut = ((max(first, start), min(last, stop)) for first, last in runs)
    return tuple((first, last) for first, last in cut if first < last)


def size(runs: Iterable[tuple[int, int]]) -> int:
    """How many positions runs hold, each as often as it occurs."""
    return sum(last - first for first, last in runs)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same positions, in order, each once."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def positions_in(runs: Iterable[tuple[int, int]]) -> list[int]:
    """The positions one by one."""
    return [position for first, last in runs for position in range(first, last)]


def bounds_of(runs: Runs) -> list[int]:
    """The bounds of all runs, one after the other."""
    return [bound for run in runs for bound in run]


def runs_between(bounds: Sequence[int]) -> Runs:
    """The runs that `bounds_of` wrote."""
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))
