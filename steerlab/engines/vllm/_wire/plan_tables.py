"""A plan's edits as numbers: rows of the tables that the operator inside vLLM reads.

An edit is a sum of terms g(r·x + b)·w, times a factor, with the norm kept or not; see
`steerlab.steering.operators._form` and `steerlab.steering.positions.schedule`. Directions are stored once per hook
point and named by their place there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

FIRST, COUNT, KEEP, SCALE, START, END, OVER, HALF_LIFE, ASKS, TRUTH = range(10)
"""Columns of `edits`: its first term and how many; 1 if it keeps the norm; its scale; the curve of its schedule; as
bits, which conditions it asks, and in which combinations of their answers it acts (bit i; bit c of i is answer c)."""
READ, WRITE, AMOUNT, GAIN, LO, HI, SLOPE, THRESHOLD, BIAS = range(9)
"""Columns of `terms`: the places of r (−1: none) and w among the directions; the gate; the bias."""
PROBE, COSINE, ABOVE, BELOW = range(4)
"""Columns of `conditions`: the place of its probe among the directions; 1 if it reads the cosine; its limits."""
EDIT_WIDTH, TERM_WIDTH, CONDITION_WIDTH = TRUTH + 1, BIAS + 1, BELOW + 1


@dataclass(frozen=True)
class PlanTables:
    """A plan's edits, terms and directions, each at one of the wired hook points.

    Attributes:
        points: per edit, at which of the wired hook points it acts.
        places: its place among the edits there.
        groups: which of a request's positions it takes.
        edits: float32 [edits, EDIT_WIDTH].
        term_points: per term its hook point; those of one hook point are in order of their place there.
        terms: float32 [terms, TERM_WIDTH].
        vector_points: per direction its hook point, in the same way.
        vectors: float32 [directions, d_model].
        condition_points: per condition, at which hook point it is read; the last sets of positions say where.
        conditions: float32 [conditions, CONDITION_WIDTH].
        rule_limits: of its token rules, see `_wire.rule_tables`; int64 [rules, 2].
        rule_sequences: of their events; int32 [rules, 2, MOST_SEQUENCES, MOST_TOKENS].
    """

    points: np.ndarray
    places: np.ndarray
    groups: np.ndarray
    edits: np.ndarray
    term_points: np.ndarray
    terms: np.ndarray
    vector_points: np.ndarray
    vectors: np.ndarray
    condition_points: np.ndarray
    conditions: np.ndarray
    rule_limits: np.ndarray
    rule_sequences: np.ndarray

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """As a message carries them, under a name."""
        return {f"{name}.{part.name}": getattr(self, part.name) for part in fields(self)}

    @classmethod
    def of_arrays(cls, name: str, arrays: Mapping[str, np.ndarray]) -> "PlanTables":
        return cls(**{part.name: arrays[f"{name}.{part.name}"] for part in fields(cls)})

    def content(self) -> list[Any]:
        """What identifies it, in bytes and shapes."""
        return [part for field in fields(self) for part in _content(getattr(self, field.name))]


def places_of(points: np.ndarray) -> np.ndarray:
    """Of entries in order, each one's place among those of its hook point.

    Examples:
        >>> places_of(np.array([3, 5, 3, 3])).tolist()
        [0, 0, 1, 2]
    """
    taken: dict[int, int] = {}
    found = []
    for point in points.tolist():
        found.append(taken.get(point, 0))
        taken[point] = found[-1] + 1
    return np.array(found, dtype=np.int64)


def passes(total: np.ndarray, count: np.ndarray, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Whether means of readings are within limits, computed as the operator does; NaN never is."""
    total, count, above, below = (values.astype(np.float32) for values in (total, count, above, below))
    with np.errstate(invalid="ignore"):
        return (total > above * count) & (total < below * count)


def _content(array: np.ndarray) -> tuple[bytes, bytes]:
    return repr((array.dtype.str, array.shape)).encode(), np.ascontiguousarray(array).tobytes()
