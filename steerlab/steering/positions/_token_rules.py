"""What decides, from a row's tokens so far, whether a token belongs to a set, and how far each row has come.

An event happens at the token that completes it. The decision about a token rests on that token and those before it, so
that it is the same while generating, in a prompt and in a text that is scored.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from steerlab.core.errors import PlanError
from steerlab.steering.positions._rows import RowPositions

NEVER = -1
"""Where an event happened that has not happened yet."""


@dataclass(frozen=True)
class TokenRule:
    """Tokens from a start event to an end event, at most so many after the last start.

    Attributes:
        starts: sequences of ids, each of which is a start.
        ends: those that are an end; none if nothing ends it.
        limit: how many tokens after the start's last one; None for all.
        inclusive: whether the tokens that complete a start or an end belong to the set.
    """

    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...] = ()
    limit: int | None = None
    inclusive: bool = False

    @property
    def events(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Sequences of the start, and of the end."""
        return self.starts, self.ends

    def holds(self, position: Any, before: tuple[Any, Any], now: tuple[Any, Any]) -> Any:
        """Which tokens belong to the set.

        Args:
            position: of each token.
            before: where the last start and the last end happened before each token, or `NEVER`.
            now: the same, the token itself taken in.
        """
        was_open, is_open = before[0] > before[1], now[0] > now[1]
        inside = was_open | is_open if self.inclusive else was_open & is_open
        if self.limit is None:
            return inside
        return inside & (position - (now if self.inclusive else before)[0] <= self.limit)


class Trail:
    """Where the events of some rules last happened in each row of a batch, followed from pass to pass.

    Args:
        rules: by the set that asks.
        n_rows: rows of the batch.
    """

    def __init__(self, rules: Mapping[Hashable, TokenRule], n_rows: int) -> None:
        self._rules, self._n_rows = rules, n_rows
        self._events = tuple(dict.fromkeys(event for rule in rules.values() for event in rule.events))
        self._memory = max((len(part) for event in self._events for part in event), default=1) - 1
        self._tail: Int[Tensor, "batch memory"] | None = None
        self._last: Int[Tensor, "events batch"] | None = None

    def follow(self, rows: RowPositions, kept: Int[Tensor, " rows"] | None) -> RowPositions:
        """A pass's tokens with which of them belong to each set.

        A row that starts from its first token is followed anew; any other goes on where its last pass ended.

        Args:
            rows: the pass.
            kept: which rows of the batch it holds; None for all.

        Raises:
            PlanError: if the tokens are not known.
        """
        if not self._rules:
            return rows
        if rows.token_ids is None:
            raise PlanError(f"{next(iter(self._rules))} needs the tokens that run, and this call does not know them.")
        device = rows.positions.device
        ids, valid = rows.token_ids.to(device), rows.is_token
        place = torch.arange(self._n_rows, device=device) if kept is None else kept.to(device)
        tail, last = self._state(device)
        first = rows.positions.masked_fill(~valid, torch.iinfo(rows.positions.dtype).max).amin(dim=1)
        anew = first == 0
        own = tail[place].masked_fill(anew[:, None], NEVER)
        compact = _Compact.of(ids, valid, own)
        positions = torch.where(anew | (compact.counts == 0), 0, first)[:, None] + compact.columns
        before, now, ends = {}, {}, []
        for index, event in enumerate(self._events):
            start = last[index, place].masked_fill(anew, NEVER)
            happened = torch.where(compact.matches(event), positions, NEVER)
            latest = torch.cat([start[:, None], happened], dim=1).cummax(dim=1).values
            before[event], now[event] = latest[:, :-1], latest[:, 1:]
            ends.append(latest[:, -1])
        self._tail = tail.index_put((place,), compact.end)
        self._last = last.index_put((torch.arange(len(ends), device=device)[:, None], place), torch.stack(ends))
        followed = {
            asker: compact.back(
                rule.holds(positions, (before[rule.starts], before[rule.ends]), (now[rule.starts], now[rule.ends]))
            )
            for asker, rule in self._rules.items()
        }
        return replace(rows, followed=followed)

    def continued(self, rows_of: Sequence[int]) -> "Trail":
        """A trail for other rows that continue these."""
        later = Trail(self._rules, len(rows_of))
        if self._tail is not None and self._last is not None:
            index = torch.tensor(list(rows_of), dtype=torch.long, device=self._tail.device)
            later._tail, later._last = self._tail[index], self._last[:, index]
        return later

    def _state(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._tail is None or self._last is None:
            tail = torch.full((self._n_rows, self._memory), NEVER, dtype=torch.long, device=device)
            return tail, torch.full((len(self._events), self._n_rows), NEVER, dtype=torch.long, device=device)
        return self._tail.to(device), self._last.to(device)


@dataclass(frozen=True)
class _Compact:
    """A pass's tokens without the padding between and around them: token r of a row stands in column r.

    Attributes:
        window: what the rows held before, and then their tokens; [batch, memory + pos].
        counts: tokens of each row.
        rank: the column that each token of the pass has gone to.
        valid: which of the pass's tokens are no padding.
    """

    window: Int[Tensor, "batch width"]
    counts: Int[Tensor, " batch"]
    rank: Int[Tensor, "batch pos"]
    valid: Bool[Tensor, "batch pos"]

    @classmethod
    def of(cls, ids: Tensor, valid: Tensor, before: Int[Tensor, "batch memory"]) -> "_Compact":
        width = ids.shape[1]
        rank = valid.cumsum(dim=1) - 1
        tokens = torch.full((len(ids), width + 1), NEVER, dtype=torch.long, device=ids.device)
        tokens = tokens.scatter(1, rank.masked_fill(~valid, width), ids.long())  # the last column takes the padding
        return cls(torch.cat([before, tokens[:, :width]], dim=1), valid.sum(dim=1), rank.clamp_min(0), valid)

    @property
    def columns(self) -> Int[Tensor, " pos"]:
        return torch.arange(self.rank.shape[1], device=self.rank.device)

    def matches(self, event: Sequence[Sequence[int]]) -> Bool[Tensor, "batch pos"]:
        """Which tokens complete one of some sequences."""
        width = self.rank.shape[1]
        found = torch.zeros_like(self.valid)
        for part in event:
            start = self.window.shape[1] - width - len(part) + 1
            steps = [self.window[:, start + k : start + k + width] == token for k, token in enumerate(part)]
            found = found | torch.stack(steps).all(dim=0)
        return found & (self.columns < self.counts[:, None])

    @property
    def end(self) -> Int[Tensor, "batch memory"]:
        """The last tokens of each row, for the next pass."""
        memory = self.window.shape[1] - self.rank.shape[1]
        return self.window.gather(1, self.counts[:, None] + torch.arange(memory, device=self.window.device))

    def back(self, mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """A mask over columns as one over the pass's tokens."""
        return mask.gather(1, self.rank) & self.valid
