"""The condition of conditional activation steering: what a probe reads of prompts, and which threshold tells them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from steerlab.core.errors import DataError
from steerlab.experiment._store.cells import Cell
from steerlab.experiment._store.run import Run
from steerlab.steering.positions._sets import Where
from steerlab.steering.positions.condition import Condition, when
from steerlab.steering.vectors import SteeringVector, VectorSet


@dataclass(frozen=True)
class Threshold:
    """A threshold on one reading.

    Attributes:
        value: the threshold.
        above: whether readings above it pass; else those below.
        f1: the harmonic mean of precision and recall on the readings that it was chosen on.
        gap: distance of the neighbouring readings, as a share of the range of all.
    """

    value: float
    above: bool
    f1: float
    gap: float

    def passes(self, readings: Float[np.ndarray, " prompts"]) -> np.ndarray:
        """Which readings pass, booleans [prompts]."""
        return readings > self.value if self.above else readings < self.value

    def condition(self, probe: SteeringVector, read: Where) -> Condition:
        """The condition for `when=` of an edit."""
        limit = {"above": self.value} if self.above else {"below": self.value}
        return when(probe, **limit, reading="cosine", read=read)


def best_threshold(wanted: Float[np.ndarray, " n"], other: Float[np.ndarray, " m"]) -> Threshold:
    """The threshold and side with the largest F1; of those the one in the widest gap between neighbouring readings.

    Args:
        wanted: readings of prompts that are to pass.
        other: readings of prompts that are not.

    Raises:
        DataError: if all readings are the same.

    Examples:
        >>> best_threshold(np.array([0.5, 0.7]), np.array([0.1, 0.2])).f1
        1.0
    """
    places = np.unique(np.concatenate([wanted, other]))
    if len(places) < 2:
        raise DataError("Every prompt has the same reading, so no threshold tells them apart.")
    gaps = np.diff(places) / (places[-1] - places[0])
    found = []
    for value, gap in zip((places[1:] + places[:-1]) / 2, gaps, strict=True):
        for above in (True, False):
            one = Threshold(float(value), above, 0.0, float(gap))
            found.append(Threshold(one.value, above, scores(one.passes(wanted), one.passes(other))["f1"], one.gap))
    return max(found, key=lambda one: (one.f1, one.gap))


def scores(wanted: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Precision, recall and F1 of a condition.

    Args:
        wanted: which of the prompts that are to pass do.
        other: which of the others do.

    Returns:
        `precision` (NaN if none passes), `recall`, `f1`.
    """
    right, false = int(wanted.sum()), int(other.sum())
    precision = right / (right + false) if right + false else float("nan")
    return {"precision": precision, "recall": right / len(wanted), "f1": 2 * right / (right + false + len(wanted))}


def readings(
    run: Run, probes: VectorSet, prompts: Sequence[str], read: Where, *, chat: bool
) -> dict[int, Float[np.ndarray, " prompts"]]:
    """The mean cosine of the stream with each probe, by layer, as a condition reads it; a cell."""
    session = run.session
    what = {"probes": [one.hash for one in probes.values()], "data": session.inputs.add_data(list(prompts))}
    cell = Cell("condition_readings", {**what, "read": read.to_json(), "chat": chat})

    def measured() -> pd.DataFrame:
        streams = session.engine.capture(list(prompts), layers=list(probes), where=read, chat=chat)
        rows = []
        for layer, probe in probes.items():
            condition = when(probe, above=0.0, reading="cosine")
            for k in range(len(prompts)):
                cosines = condition.measure(streams.of(k, layer)[None], probe.unit)
                rows.append((layer, k, float(cosines.mean())))
        return pd.DataFrame(rows, columns=["layer", "prompt", "reading"])

    frame = session.cells.get(cell, session.engine_hash, measured)
    return {layer: frame[frame.layer == layer].reading.to_numpy(dtype=float) for layer in probes}
