"""What happened to one request on this rank, and what its passes measured, each prediction once.

Where a position is run again, after a preemption, the later value counts.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from steerlab.core.token_sets import TokenSets
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.measures.quantities import LogDistribution

DRAWN = "log q of the sampled token"
_NOWHERE, _NOTHING = np.zeros(0, dtype=np.int64), np.zeros((1, 0), dtype=np.float32)


@dataclass(eq=False)
class PassValues:
    """What one pass measured: per quantity a value per scored row, on the device until `host` is called."""

    values: dict[Any, Tensor] = field(default_factory=dict)
    distributions: dict[int, Tensor] = field(default_factory=dict)  # by first row of a request, on the host
    supports: TokenSets | None = None
    _stacked: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)

    @functools.cached_property
    def host(self) -> dict[Any, np.ndarray]:
        """The values, once everything that computes them has run."""
        return {name: value.float().cpu().numpy() for name, value in self.values.items()}

    def rows(self, names: tuple[Any, ...]) -> np.ndarray:
        """Some of the values, float32 [names, rows]."""
        found = self._stacked.get(names)
        if found is None:
            width = len(next(iter(self.host.values())))
            chosen = [self.host[name] for name in names]
            found = self._stacked[names] = np.stack(chosen) if chosen else np.zeros((0, width), dtype=np.float32)
        return found


@dataclass(frozen=True)
class RequestValues:
    """What one pass found for one request.

    Attributes:
        first: the first prediction, by its place among the tokens of the request's score.
        count: how many predictions.
        found: everything the pass found.
        row: which of its rows belongs to the first one.
    """

    first: int
    count: int
    found: PassValues
    row: int

    def values(self, names: tuple[Any, ...]) -> np.ndarray:
        """Some quantities of these predictions, float32 [names, count]."""
        return self.found.rows(names)[:, self.row : self.row + self.count]


@dataclass
class Draws:
    """Where log q of a request's sampled tokens is: three lists with an entry per token. An object each would be slow.

    Attributes:
        found: what the passes found.
        rows: which row of that is this request's.
        positions: after which the tokens were drawn; one may occur twice.
        sets: which of the supports of that is this request's; −1 if none was asked for.
    """

    found: list[PassValues] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sets: list[int] = field(default_factory=list)

    def add(self, found: PassValues, row: int, position: int, in_sets: int = -1) -> None:
        self.found.append(found)
        self.rows.append(row)
        self.positions.append(position)
        self.sets.append(in_sets)


@dataclass
class RequestRecord:
    """What happened to one request on this rank.

    Attributes:
        spec: what it asked for.
        problem: why its edits could not be made, if so.
        ran: runs of positions that went through the model, in order; a position may occur twice.
        tallies: copies of the slot's tallies, one per stay in a slot; [hook points, edits, 3].
        answers: what its conditions had read when it left its last slot, [conditions, 2].
        trail: where its token rules stood when it left its last slot: the position after the last token, where each
            event happened last, and the last tokens.
        read: positions that were read, in order, and their streams [hook points, positions, d_model].
        measured: what passes measured, in order; a position may occur twice.
        draws: log q of sampled tokens, in order.
    """

    spec: RequestSpec
    problem: str = ""
    ran: list[tuple[int, int]] = field(default_factory=list)
    tallies: list[Tensor] = field(default_factory=list)
    answers: Tensor | None = None
    trail: tuple[int, Tensor, Tensor] | None = None
    read: list[tuple[list[int], Tensor]] = field(default_factory=list)
    measured: list[RequestValues] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)


def gathered(record: RequestRecord) -> tuple[np.ndarray, np.ndarray]:
    """Values of a request's predictions.

    Returns:
        Which predictions were measured, in order (tokens of its score, or positions after which it sampled), and per
        quantity with one value a prediction its values, in the order in which the request names them; float32
        [quantities, predictions].
    """
    score = record.spec.score
    if score is None:
        return _drawn(record.draws)
    names = tuple(m for m in score.measures if not isinstance(m, LogDistribution))
    if not record.measured:
        return np.zeros(0, dtype=np.int64), np.zeros((len(names), 0), dtype=np.float32)
    at, last = _last_of_each(record.measured)
    if len(record.measured) == 1:
        return at, record.measured[0].values(names)
    return at, np.concatenate([part.values(names) for part in record.measured], axis=1)[:, last]


def _drawn(draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Log q by position, [1, positions]."""
    if not draws.rows:
        return _NOWHERE, _NOTHING
    values = [found.host[DRAWN][row] for found, row in zip(draws.found, draws.rows, strict=True)]
    last = dict(zip(draws.positions, values, strict=True))
    at = sorted(last)
    return np.array(at, dtype=np.int64), np.array([[last[position] for position in at]], dtype=np.float32)


def gathered_supports(records: Sequence[RequestRecord]) -> list[TokenSets | None]:
    """The sets that each request's tokens were drawn from, by position; None if nobody asked or this rank has none."""
    passes = {id(found): found for record in records for found in record.draws.found if found.supports is not None}
    if not passes:
        return [None] * len(records)
    every = TokenSets.joined([found.supports for found in passes.values() if found.supports is not None])
    sizes = [len(found.supports or ()) for found in passes.values()]
    begins = dict(zip(passes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    return [_supports(record.draws, every, begins) if record.spec.support else None for record in records]


def _supports(draws: Draws, every: TokenSets, begins: Mapping[int, int]) -> TokenSets:
    places = [begins[id(found)] + row for found, row in zip(draws.found, draws.sets, strict=True)]
    last = dict(zip(draws.positions, places, strict=True))
    return every.take([last[position] for position in sorted(last)])


def gathered_distribution(record: RequestRecord) -> np.ndarray | None:
    """Log-distributions of a request's predictions, float32 [predictions, d_vocab]; None if none were asked for."""
    if record.spec.score is None or LogDistribution() not in record.spec.score.measures:
        return None
    _, last = _last_of_each(record.measured)
    for part in record.measured:
        _ = part.found.host  # waits for the device, which writes the distributions before
    return np.concatenate([part.found.distributions[part.row].numpy() for part in record.measured])[last]


def _last_of_each(parts: list[RequestValues]) -> tuple[np.ndarray, np.ndarray]:
    """Every prediction once, in order, and where its last value is among those of all parts."""
    if len(parts) == 1:
        order = np.arange(parts[0].count)
        return order + parts[0].first, order
    every = np.concatenate([np.arange(part.first, part.first + part.count) for part in parts])
    at, from_end = np.unique(every[::-1], return_index=True)
    return at, len(every) - 1 - from_end
