"""What a worker measures beside running the model: quantities of chosen predictions, and log q of sampled tokens.

After a pass, outside of any CUDA graph, the final hidden states of the rows that are scored, and of no others, go
through the LM head in chunks whose buffer was reserved at the start. Results stay on the device until they are asked
for; where a position is run again, after a preemption, the later value counts.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab.engines.vllm._wire.request_spec import ScoreSpec
from steerlab.engines.vllm._worker.head import Head
from steerlab.engines.vllm._worker.request_record import DRAWN, PassValues, RequestRecord, RequestValues
from steerlab.engines.vllm._worker.row_sums import log_probs_of, row_sums
from steerlab.engines.vllm._worker.tables import to_device
from steerlab.measures._supports import sets_of
from steerlab.measures.nucleus import widen
from steerlab.measures.quantities import LogDistribution, Quantity, TokenLogProb

SCRATCH_PER_LOGIT = 64
"""Bytes that a quantity of a whole row takes per logit while it is computed, sorting included."""

HIGHEST_CHUNK = 64
"""A chunk's rows are a multiple of this, if there are as many."""


@dataclass(frozen=True)
class Buffers:
    """Working memory, reserved when the model is loaded.

    Attributes:
        logits: of the rows of one chunk, on this rank.
        scratch_bytes: left free beside it, for quantities that need whole rows.
    """

    logits: Float[Tensor, "rows width"]
    scratch_bytes: int

    @classmethod
    def make(cls, head: Head, budget: int, n_tokens: int, device: torch.device) -> "Buffers":
        """Half of a budget of bytes for logits, half for what is computed from them; no more than a pass can use."""
        fitting = max(1, budget // 2 // (4 * head.width))
        rows = fitting // HIGHEST_CHUNK * HIGHEST_CHUNK or fitting
        rows = min(rows, n_tokens)
        scratch = min(budget // 2, rows * head.d_vocab * SCRATCH_PER_LOGIT)
        return cls(torch.empty((rows, head.width), dtype=torch.float32, device=device), scratch)

    @property
    def n_bytes(self) -> int:
        """The memory they take or keep free."""
        return self.logits.nbytes + self.scratch_bytes

    def rows_at_once(self, d_vocab: int) -> int:
        """Whole rows that a quantity may look at in one go."""
        return max(1, self.scratch_bytes // (SCRATCH_PER_LOGIT * d_vocab))


@dataclass(frozen=True)
class Wanted:
    """What a coming pass must measure of one request.

    Attributes:
        record: where it goes.
        score: what is asked for.
        indices: which of its tokens are about positions of this pass.
        shift: from a position to its place in the pass.
    """

    record: RequestRecord
    score: ScoreSpec
    indices: range
    shift: int

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.score.tokens[self.indices.start : self.indices.stop], dtype=np.int64)

    @property
    def places(self) -> np.ndarray:
        """Where the pass holds the positions that predict them."""
        steps = np.maximum(0, np.arange(self.indices.start, self.indices.stop) - self.score.n_first + 1)
        return self.score.start + steps + self.shift


class Measuring:
    """Measures what the requests in the slots ask for, pass by pass.

    Args:
        head: the model's LM head.
        buffers: working memory.
        n_slots: requests at once.
        keeps_distributions: whether this rank is the one that hands over whole distributions.
    """

    def __init__(self, head: Head, buffers: Buffers, n_slots: int, *, keeps_distributions: bool = True) -> None:
        self.head, self.buffers = head, buffers
        self._keeps_distributions = keeps_distributions
        self._in_slots: dict[int, RequestRecord] = {}
        self._scores = np.zeros(n_slots, dtype=bool)
        self._draws = np.zeros(n_slots, dtype=bool)
        self._wanted: list[Wanted] = []
        # by slot: whose next token is drawn, after which position
        self._drawing: dict[int, tuple[RequestRecord, int]] = {}

    def enter(self, slot: int, record: RequestRecord) -> None:
        self._scores[slot], self._draws[slot] = record.spec.score is not None, record.spec.draw
        if self._scores[slot] or self._draws[slot]:
            self._in_slots[slot] = record

    def leave(self, slot: int) -> None:
        self._scores[slot] = self._draws[slot] = False
        self._in_slots.pop(slot, None)

    def begin(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """States what the coming pass holds: per request its slot, the first position and the number of tokens."""
        self.begin_empty()
        if not self._in_slots:
            return
        places = np.cumsum(lengths) - lengths
        for row in np.nonzero(self._scores[slots])[0].tolist():
            self._plan(self._in_slots[int(slots[row])], int(starts[row]), int(lengths[row]), int(places[row]))
        for row in np.nonzero(self._draws[slots])[0].tolist():
            slot = int(slots[row])
            self._drawing[slot] = self._in_slots[slot], int(starts[row] + lengths[row]) - 1

    def begin_empty(self) -> None:
        """States that nothing in the coming pass is measured."""
        self._wanted, self._drawing = [], {}

    def _plan(self, record: RequestRecord, start: int, length: int, place: int) -> None:
        score = record.spec.score
        assert score is not None
        indices = score.between(start, start + length)
        if indices:
            self._wanted.append(Wanted(record, score, indices, place - start))

    @torch.inference_mode()
    def score(self, hidden: Float[Tensor, "tokens d_model"]) -> None:
        """Measures the pass that has just run.

        Args:
            hidden: final hidden states of all its tokens; padding may follow.
        """
        wanted, self._wanted = self._wanted, []
        if not wanted:
            return
        device = hidden.device
        rows = np.concatenate([w.places for w in wanted])
        places = to_device(rows, device)
        tokens = to_device(np.concatenate([w.tokens for w in wanted]), device)
        firsts = np.cumsum([0, *(len(w.indices) for w in wanted)])
        found = PassValues()
        pass_ = _Pass(self, wanted, firsts.tolist(), tokens, found)
        size = len(self.buffers.logits)
        for start in range(0, len(rows), size):
            part = places[start : start + size]
            logits = self.buffers.logits[: len(part)]
            self.head.fill(hidden.index_select(0, part), logits)
            pass_.take(logits, start)
        pass_.finish()
        for one, row in zip(wanted, firsts.tolist(), strict=False):
            one.record.measured.append(RequestValues(one.indices.start, len(one.indices), found, row))

    @torch.inference_mode()
    def draw(self, slots: np.ndarray, logits: Float[Tensor, "batch d_vocab"], tokens: Int[Tensor, " batch"]) -> None:
        """Measures log q of tokens that have just been drawn, and notes the sets they came from where that is asked.

        Args:
            slots: of the requests in the rows.
            logits: what they were drawn from, −inf outside the set that the sampler kept.
            tokens: the tokens.
        """
        drawing, self._drawing = self._drawing, {}
        sums = row_sums(widen(logits), tokens.long(), logits.shape[-1], 0)
        found = PassValues({DRAWN: log_probs_of(sums[None])})
        rows = {row: drawing[slot] for row, slot in enumerate(slots.tolist()) if slot in drawing}
        wanted = [row for row, (record, _) in rows.items() if record.spec.support and self._keeps_distributions]
        if wanted:
            found.supports = sets_of(logits[to_device(np.array(wanted), logits.device)] > -math.inf)
        places = {row: place for place, row in enumerate(wanted)}
        for row, (record, position) in rows.items():
            record.draws.add(found, row, position, places.get(row, -1))

    @property
    def is_drawing(self) -> bool:
        """Whether log q of tokens is wanted that the current pass draws."""
        return bool(self._drawing)


class _Pass:
    """The chunks of one pass on their way to values.

    Args:
        measuring: what this belongs to.
        wanted: the requests.
        firsts: the first row of each, and the number of all.
        tokens: the predicted token of every row.
        found: what to fill.
    """

    def __init__(
        self, measuring: Measuring, wanted: Sequence[Wanted], firsts: Sequence[int], tokens: Tensor, found: PassValues
    ) -> None:
        self._head, self._buffers, self._tokens, self._found = measuring.head, measuring.buffers, tokens, found
        self._sums: list[Tensor] = []
        self._whole: dict[Quantity, list[tuple[int, int]]] = {}
        for one, (start, stop) in zip(wanted, itertools.pairwise(firsts), strict=True):
            for quantity in one.score.measures:
                if not isinstance(quantity, TokenLogProb):
                    self._whole.setdefault(quantity, []).append((start, stop))
        for quantity, ranges in self._whole.items():
            if not isinstance(quantity, LogDistribution):
                found.values[quantity] = torch.full((len(tokens),), torch.nan, device=tokens.device)
            elif measuring._keeps_distributions:
                found.distributions |= {start: self._host_rows(stop - start) for start, stop in ranges}

    def _host_rows(self, count: int) -> Tensor:
        """Host memory that a GPU writes to by itself."""
        is_cuda = self._tokens.is_cuda
        return torch.empty((count, self._head.d_vocab), dtype=torch.float32, pin_memory=is_cuda)

    def take(self, logits: Float[Tensor, "rows width"], start: int) -> None:
        stop = start + len(logits)
        self._sums.append(row_sums(logits, self._tokens[start:stop], self._head.n_valid, self._head.offset))
        for quantity, ranges in self._whole.items():
            for first, last, owner in self._pieces(ranges, start, stop):
                whole = self._head.whole(logits[first - start : last - start])
                value = quantity(whole, self._tokens[first:last])
                if not isinstance(quantity, LogDistribution):
                    self._found.values[quantity][first:last] = value
                elif owner in self._found.distributions:
                    self._found.distributions[owner][first - owner : last - owner].copy_(value, non_blocking=True)

    def _pieces(self, ranges: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The rows of some requests that lie in a chunk, few enough at once, and the first row of their request."""
        step = self._buffers.rows_at_once(self._head.d_vocab)
        for owner, end in ranges:
            first, last = max(owner, start), min(end, stop)
            for piece in range(first, last, step):
                yield piece, min(piece + step, last), owner

    def finish(self) -> None:
        """Puts the parts of the vocabulary together: all that ranks exchange for log-probabilities."""
        sums = torch.cat(self._sums)
        if self._head.n_ranks > 1:
            from vllm.distributed.parallel_state import get_tp_group

            sums = get_tp_group().all_gather(sums, dim=-1).view(len(sums), self._head.n_ranks, 3).transpose(0, 1)
        else:
            sums = sums[None]
        self._found.values[TokenLogProb()] = log_probs_of(sums)
