"""What each request's tokens so far say about the one that runs: sets of positions that look at tokens.

Before each pass, and on the device, it is decided from the pass's own token ids to which of its plan's rules a token
belongs; the answers are bits of the token table, which the operator reads. How far a request has come (where its events
happened last, and its last tokens) stays on the device from pass to pass, so nothing waits for a sampled token to reach
the host, and all shapes follow from the number of tokens. A request that does not go on from its last pass, because it
is new, begins in the prefix cache or was preempted, is brought up to date from its tokens, which the host then knows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from steerlab.engines.vllm._wire.config import MOST_SEQUENCES, MOST_TOKENS, SteeringConfig
from steerlab.engines.vllm._wire.rule_tables import ANYTHING, NOTHING
from steerlab.engines.vllm._worker.request_record import RequestRecord
from steerlab.engines.vllm._worker.tables import ANSWERS, POSITION, to_device

NEVER = -1
AT_ONCE = 2048
"""Tokens that are compared in one go: longer passes take several, so that working memory stays small."""

Known: TypeAlias = Callable[[], Sequence[int]]
"""A request's tokens as far as the host knows them."""


@dataclass(frozen=True)
class Rules:
    """The rules of a plan, as `_wire.rule_tables` has them.

    Attributes:
        limits: per rule, how many tokens after its last start, and whether events belong to it; [rules, 2].
        sequences: per rule, the sequences of its start and of its end; [rules, 2, sequences, tokens].
    """

    limits: np.ndarray
    sequences: np.ndarray


@dataclass(frozen=True)
class _Part:
    """Some of a pass's tokens, as indices on the device; tokens of one request follow each other.

    Attributes:
        places: of each token in the pass.
        slots: of each token's request.
        requests: numbers the requests of this part.
        offsets: how many tokens of the request come before it in this part.
        ends: which of these tokens is the last of each request.
        end_slots: the request's slot.
    """

    places: Int[Tensor, " tokens"]
    slots: Int[Tensor, " tokens"]
    requests: Int[Tensor, " tokens"]
    offsets: Int[Tensor, " tokens"]
    ends: Int[Tensor, " requests"]
    end_slots: Int[Tensor, " requests"]


class Following:
    """Rules and trails of the requests in slots.

    Args:
        config: what is wired.
        tokens: the table of a pass's tokens, whose answers are written.
        n_slots: requests at most.
    """

    def __init__(self, config: SteeringConfig, tokens: Int[Tensor, "tokens 4"], n_slots: int) -> None:
        self._tokens, self._n_rules = tokens, config.max_token_rules
        device, n_events = tokens.device, 2 * config.max_token_rules
        self._limits = torch.zeros(n_slots, self._n_rules, 2, dtype=torch.int64, device=device)
        self._sequences = torch.full(
            (n_slots, n_events, MOST_SEQUENCES, MOST_TOKENS), NOTHING, dtype=torch.int32, device=device
        )
        self._last = torch.full((n_slots, n_events), NEVER, dtype=torch.int64, device=device)
        self._tail = torch.full((n_slots, MOST_TOKENS - 1), NEVER, dtype=torch.int32, device=device)
        self._bits = torch.ones(self._n_rules, dtype=torch.int32, device=device) << torch.arange(
            self._n_rules, dtype=torch.int32, device=device
        )
        self._back = torch.arange(MOST_TOKENS - 1, -1, -1, device=device)
        self._is_followed = np.zeros(n_slots, dtype=bool)
        self._next = np.full(n_slots, -1, dtype=np.int64)
        self._requests: dict[int, tuple[Rules, RequestRecord, Known]] = {}
        self._parts: list[_Part] = []

    @property
    def n_bytes(self) -> int:
        """The memory of its buffers."""
        return sum(table.nbytes for table in (self._limits, self._sequences, self._last, self._tail))

    def enter(self, slot: int, rules: Rules, record: RequestRecord, known: Known) -> None:
        """A request whose positions depend on tokens takes a slot."""
        device = self._tokens.device
        limits = np.zeros((self._n_rules, 2), dtype=np.int64)
        sequences = np.full((self._n_rules, 2, MOST_SEQUENCES, MOST_TOKENS), NOTHING, dtype=np.int32)
        limits[: len(rules.limits)] = rules.limits
        sequences[: len(rules.sequences)] = rules.sequences
        self._limits[slot] = to_device(limits, device)
        self._sequences[slot] = to_device(sequences.reshape(2 * self._n_rules, MOST_SEQUENCES, MOST_TOKENS), device)
        self._requests[slot] = rules, record, known
        self._is_followed[slot], self._next[slot] = True, -1

    def leave(self, slot: int) -> None:
        """A request leaves its slot; where it stood is kept, for it may come back and go on."""
        if not self._is_followed[slot]:
            return
        _, record, _ = self._requests.pop(slot)
        if self._next[slot] >= 0:
            record.trail = int(self._next[slot]), self._last[slot].clone(), self._tail[slot].clone()
        self._is_followed[slot] = False

    def begin(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ids: Tensor | None) -> None:
        """Decides for the tokens of a pass; their table is written already.

        Args:
            slots: of the pass's requests, in order.
            starts: the position of each one's first token.
            lengths: how many tokens it has.
            ids: of the pass's tokens, on the device.
        """
        followed = self._is_followed[slots]
        self._parts = []
        if not followed.any():
            return
        for slot, start in zip(slots[followed].tolist(), starts[followed].tolist(), strict=True):
            if start != self._next[slot]:
                self._bring_up_to(slot, start)
        self._next[slots[followed]] = (starts + lengths)[followed]
        self._parts = list(self._parts_of(slots, lengths, followed))
        self.go_on(ids)

    def advance(self, slots: np.ndarray, starts: np.ndarray, ids: Tensor | None) -> None:
        """Decides for a pass that holds the next token of every request of the last one."""
        if self._parts:
            followed = self._is_followed[slots]
            self._next[slots[followed]] = starts[followed] + 1
            self.go_on(ids)

    def go_on(self, ids: Tensor | None) -> None:
        """Compares the pass's tokens with the sequences of their requests' rules, and moves the trails on."""
        assert ids is not None, "the runner gives the ids of every pass"
        for part in self._parts:
            self._compare(part, ids)

    def _compare(self, part: _Part, ids: Tensor) -> None:
        first = (part.offsets == 0)[:, None]
        window = self._window(part, ids)
        wanted = self._sequences[part.slots]
        happened = ((wanted == window[:, None, None]) | (wanted == ANYTHING)).all(dim=-1).any(dim=-1)
        positions = self._tokens[part.places, POSITION].long()[:, None]
        earlier = self._last[part.slots] + 1  # positions are counted from 1 here, so that 0 is never
        floor = part.requests[:, None] << 32  # rises from request to request, so a running maximum stays inside one
        latest = torch.maximum(torch.where(happened, positions + 1, 0), torch.where(first, earlier, 0))
        now = (floor + latest).cummax(dim=0).values - floor
        before = torch.where(first, earlier, now.roll(1, dims=0))
        answers = self._holds(positions, before - 1, now - 1, self._limits[part.slots])
        self._tokens[:, ANSWERS].index_copy_(0, part.places, (answers * self._bits).sum(dim=1, dtype=torch.int32))
        self._last.index_copy_(0, part.end_slots, now[part.ends] - 1)
        self._tail.index_copy_(0, part.end_slots, window[part.ends, 1:])

    def _window(self, part: _Part, ids: Tensor) -> Int[Tensor, "tokens memory"]:
        """Each token after those before it, of this pass or, from the slot, of earlier ones."""
        own = ids[part.places].to(torch.int32)
        here = torch.arange(len(own), device=own.device)[:, None] - self._back
        column = (MOST_TOKENS - 1 - self._back + part.offsets[:, None]).clamp(0, MOST_TOKENS - 2)
        kept = self._tail[part.slots[:, None], column]
        return torch.where(self._back <= part.offsets[:, None], own[here.clamp_min(0)], kept)

    @staticmethod
    def _holds(positions: Tensor, before: Tensor, now: Tensor, limits: Tensor) -> Tensor:
        """To which rules each token belongs; as `TokenRule.holds`, all rules at once."""
        limit, inclusive = limits[..., 0], limits[..., 1] > 0
        was_open, is_open = before[:, 0::2] > before[:, 1::2], now[:, 0::2] > now[:, 1::2]
        inside = torch.where(inclusive, was_open | is_open, was_open & is_open)
        since = torch.where(inclusive, now[:, 0::2], before[:, 0::2])
        return inside & (positions - since <= limit)

    def _parts_of(self, slots: np.ndarray, lengths: np.ndarray, followed: np.ndarray) -> list[_Part]:
        firsts = np.cumsum(lengths) - lengths
        places = [
            np.arange(first, first + length) for first, length in zip(firsts[followed], lengths[followed], strict=True)
        ]
        every, owners = np.concatenate(places), np.repeat(slots[followed], lengths[followed])
        return [self._part(every[i : i + AT_ONCE], owners[i : i + AT_ONCE]) for i in range(0, len(every), AT_ONCE)]

    def _part(self, places: np.ndarray, slots: np.ndarray) -> _Part:
        begins = np.flatnonzero(np.diff(slots, prepend=-1))
        sizes = np.diff(begins, append=len(slots))
        requests = np.repeat(np.arange(len(begins)), sizes)
        offsets = np.arange(len(slots)) - np.repeat(begins, sizes)
        ends = begins + sizes - 1
        columns = (places, slots, requests, offsets, ends, slots[ends])
        return _Part(*(to_device(column.astype(np.int64), self._tokens.device) for column in columns))

    def _bring_up_to(self, slot: int, start: int) -> None:
        """Writes where a request stands that goes on at a position."""
        rules, record, known = self._requests[slot]
        if record.trail is not None and record.trail[0] == start:
            self._last[slot], self._tail[slot] = record.trail[1], record.trail[2]
            return
        tokens = np.asarray(known()[:start] if start else [], dtype=np.int64)
        if len(tokens) < start:
            record.problem = f"its positions depend on tokens before {start}, of which only {len(tokens)} are known"
        last, tail = trail_at(rules, tokens)
        whole = np.full(self._last.shape[1], NEVER, dtype=np.int64)
        whole[: len(last)] = last
        device = self._tokens.device
        self._last[slot], self._tail[slot] = to_device(whole, device), to_device(tail, device)


def trail_at(rules: Rules, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each event of some rules happened last in a row of tokens, and the row's last tokens.

    Returns:
        Positions, or `NEVER`, int64 [events]; int32 [MOST_TOKENS − 1], filled up with `NEVER` at the front.
    """
    events = rules.sequences.reshape(-1, *rules.sequences.shape[2:])
    last = np.array([_last_of(event, tokens) for event in events], dtype=np.int64)
    tail = np.full(MOST_TOKENS - 1, NEVER, dtype=np.int32)
    kept = tokens[-(MOST_TOKENS - 1) :]
    tail[len(tail) - len(kept) :] = kept
    return last, tail


def _last_of(event: np.ndarray, tokens: np.ndarray) -> int:
    found = NEVER
    for row in event:
        wanted = row[row != ANYTHING]
        if NOTHING in wanted or len(wanted) > len(tokens):
            continue
        places = len(tokens) - len(wanted) + 1
        hits = np.ones(places, dtype=bool)
        for k, token in enumerate(wanted.tolist()):
            hits &= tokens[k : k + places] == token
        if hits.any():
            found = max(found, int(np.flatnonzero(hits)[-1]) + len(wanted) - 1)
    return found
