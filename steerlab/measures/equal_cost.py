"""Interpolation along a curve of cost: what an arm does where it costs as much as another."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class Crossing:
    """Where a path of points first reaches a level of cost.

    Attributes:
        index: the point before it.
        weight: how far it lies toward the next point, 0 to 1.
    """

    index: int
    weight: float

    def of(self, values: Float[np.ndarray, "*rows points"]) -> Float[np.ndarray, "*rows"]:
        """Values at the crossing, interpolated linearly between the two points."""
        after = min(self.index + 1, values.shape[-1] - 1)
        return np.asarray(values[..., self.index] * (1 - self.weight) + values[..., after] * self.weight)


def first_crossing(costs: Float[np.ndarray, " points"], level: float) -> Crossing | None:
    """The first place along a path at which its cost is `level`; None if that lies outside what was measured.

    Nothing is extrapolated. A cost that falls and rises again is followed in the order of the points, so the smallest
    strength that costs so much counts.

    Args:
        costs: cost of each point, in order of strength.
        level: the cost wanted, in the same unit.

    Examples:
        >>> first_crossing(np.array([0.0, 0.1, 0.3]), 0.2)
        Crossing(index=1, weight=0.5)
        >>> first_crossing(np.array([0.0, 0.1, 0.3]), 0.4) is None
        True
    """
    for index, (before, after) in enumerate(pairwise(costs.tolist())):
        if before == level:
            return Crossing(index, 0.0)
        if min(before, after) <= level <= max(before, after):
            return Crossing(index, float((level - before) / (after - before)))
    return Crossing(len(costs) - 1, 0.0) if len(costs) and costs[-1] == level else None
