"""Runs of positions: half-open intervals, as plans, receipts and workers hold them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Runs = tuple[tuple[int, int], ...]
"""Positions as half-open intervals, in order and apart from each other."""

RunsByTokens = tuple[tuple[int, int, int], ...]
"""The same where tokens decide: each run with the combinations of its request's token rules in which it acts; bit i is
combination i, and bit r of i is the answer of rule r."""

ALWAYS = -1
"""What acts in every combination: all bits."""


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


def clip(runs: Iterable[tuple[int, ...]], start: int, stop: int) -> Any:
    """The part of the runs inside start ≤ p < stop."""
    found = []
    for run in runs:
        first, last = max(run[0], start), min(run[1], stop)
        if first < last:
            found.append((first, last, *run[2:]))
    return tuple(found)


def runs_by_tokens(truths: np.ndarray) -> RunsByTokens:
    """Positions at which some combination acts, given which do at each.

    Examples:
        >>> runs_by_tokens(np.array([0, 2, 2, 3, 0, 2]))
        ((1, 3, 2), (3, 4, 3), (5, 6, 2))
    """
    begins = np.flatnonzero(np.diff(truths, prepend=-1))
    ends = [*begins[1:].tolist(), len(truths)]
    return tuple(
        (first, last, int(truths[first])) for first, last in zip(begins.tolist(), ends, strict=True) if truths[first]
    )


def depends_on_tokens(runs: Sequence[tuple[int, ...]]) -> bool:
    """Whether tokens decide about some of these runs."""
    return any(len(run) > 2 for run in runs)


def size(runs: Iterable[tuple[int, ...]]) -> int:
    """How many positions runs hold, each as often as it occurs."""
    return sum(last - first for first, last, *_ in runs)


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
    return [position for first, last in runs for position in range(first, last)]


def bounds_of(runs: Runs | RunsByTokens) -> list[int]:
    """The bounds of all runs, one after the other."""
    return [bound for run in runs for bound in run[:2]]


def runs_between(bounds: Sequence[int]) -> Runs:
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))
