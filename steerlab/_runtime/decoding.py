"""The generation loop: one cached pass per token, hooks and plan active in each, little read back from the device."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab._kernels.availability import runs_kernels
from steerlab._runtime.rows import left_padded
from steerlab.core._spelling import Continuation
from steerlab.core._stopping import eos_ids_of, find_stop
from steerlab.core.policy import SamplingPolicy
from steerlab.core.token_sets import TokenSets
from steerlab.measures._supports import sets_of
from steerlab.measures._token_draws import draw
from steerlab.measures.log_probs import chosen_log_probs, rows_not_finite
from steerlab.measures.nucleus import apply_repetition_penalty, policy_log_probs, truncates

FinishReason = Literal["eos", "stop", "length", "error"]
POLL_STEPS = 8


class GrowingRows(Protocol):
    """Rows that a loop can extend; see `Rows`."""

    device: torch.device
    can_narrow: bool

    def extend(self, ids: Tensor, valid: Tensor, *, keep: int = 0) -> Tensor:
        """Runs a block of tokens."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Runs one token per row; a negative id means that the row has ended."""
        ...

    def narrow(self, kept: Tensor) -> None:
        """Drops all rows but these."""
        ...


@dataclass(frozen=True)
class StopRules:
    """When a row ends; one whose logits are no longer finite ends as well, with the reason `error`.

    Attributes:
        eos_ids: a row ends after any of these.
        strings: a row ends when its decoded text contains any of these.
        max_new_tokens: a row ends after this many tokens.
    """

    eos_ids: frozenset[int]
    strings: tuple[str, ...]
    max_new_tokens: int


@dataclass
class RowOutput:
    """What a row has produced; the sets that its tokens were drawn from only if asked for."""

    token_ids: list[int] = field(default_factory=list)
    token_log_probs: list[float] = field(default_factory=list)
    token_log_qs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    supports: TokenSets | None = None


class Decoding:
    """One run of the loop over a batch.

    Args:
        rows: fresh rows, one per prompt.
        prompts: the ids of each prompt.
        policy: the sampling policy.
        keys: of each row's draws, one per step; unused when greedy.
        rules: when rows end.
        tokenizer: decodes for stop strings; may be None without any.
        with_log_probs: also record log p and log q of every token.
        with_support: also record the set that every token was drawn from, which waits for the device at each step.
    """

    def __init__(
        self,
        rows: GrowingRows,
        prompts: Sequence[Sequence[int]],
        policy: SamplingPolicy,
        keys: Int[Tensor, "batch steps"],
        rules: StopRules,
        tokenizer: Any = None,
        *,
        with_log_probs: bool = True,
        with_support: bool = False,
    ) -> None:
        self.rows, self.prompts, self.policy, self.rules = rows, prompts, policy, rules
        self.tokenizer, self.with_log_probs = tokenizer, with_log_probs
        self._after = [Continuation(tokenizer, prompt) for prompt in prompts] if rules.strings else []
        self._keys = keys
        self._stopped: dict[int, int] = {}
        self._failed: Tensor | None = None
        self._columns: list[tuple[Any, ...]] = []  # per step: rows, tokens, log p, log q
        self._with_support, self._d_vocab = with_support, 0
        self._sets: list[TokenSets] = []  # per step, of its rows

    def run(self) -> list[RowOutput]:
        """Continues every prompt until each row has ended."""
        for _ in self.steps():
            pass
        return self.outputs()

    def steps(self) -> Iterator[Int[Tensor, " batch"]]:
        """Runs token by token, yielding each step's tokens; rows that have ended hold a negative id.

        A row whose logits are not finite ends there, without a token of that step; the others go on as they would.
        """
        if self.rules.max_new_tokens == 0:
            return
        ids, valid = left_padded(self.prompts)
        logits = self.rows.extend(ids, valid, keep=1)[:, -1]
        device, self._d_vocab = logits.device, logits.shape[-1]
        live_rows = torch.arange(len(self.prompts), device=device)
        ended = torch.zeros(len(self.prompts), dtype=torch.bool, device=device)
        self._failed = torch.zeros_like(ended)
        eos = torch.tensor(sorted(self.rules.eos_ids), device=device)
        keys = self._keys if self.policy.is_greedy else self._keys.to(device)
        seen = _seen(ids, valid, logits.shape[-1]).to(device) if self.policy.repetition_penalty != 1 else None
        for index in range(self.rules.max_new_tokens):
            mine = keys[:, index] if self.policy.is_greedy else keys[live_rows, index]
            broken, tokens, log_p, log_q = self._draw(logits, seen, mine)
            is_whole = len(live_rows) == len(self.prompts)
            failed = self._failed if is_whole else self._failed[live_rows]
            tokens, fed = settled(tokens, broken, ended, failed, eos)
            if not is_whole:
                self._failed[live_rows] = failed
            self._columns.append((live_rows, tokens, log_p, log_q))
            yield tokens
            if self.rules.strings:
                ended = ended | self._stop_strings(ended)
                fed = fed.masked_fill(ended, -1)
            if index + 1 == self.rules.max_new_tokens:
                break
            if self._polls(index, device):
                n_live = int((~ended).sum())
                if n_live == 0:
                    break
                if self.rows.can_narrow and n_live <= len(live_rows) // 2:
                    kept = (~ended).nonzero()[:, 0]
                    live_rows, ended, tokens, fed = live_rows[kept], ended[kept], tokens[kept], fed[kept]
                    seen = None if seen is None else seen[kept]
                    self.rows.narrow(kept)
            if seen is not None:
                seen = seen.scatter(1, tokens.clamp_min(0)[:, None], True)
            logits = self.rows.step(fed)[:, -1]

    def outputs(self) -> list[RowOutput]:
        """What every row has produced, read back in one go."""
        outputs = [RowOutput() for _ in self.prompts]
        drawn: list[list[int]] = [[] for _ in self.prompts]
        first = 0
        for place, tokens, log_p, log_q in self._read_columns():
            for k, (row, token) in enumerate(zip(place, tokens, strict=True)):
                if token < 0:
                    continue
                outputs[row].token_ids.append(token)
                drawn[row].append(first + k)
                if self.with_log_probs:
                    outputs[row].token_log_probs.append(log_p[k])
                    outputs[row].token_log_qs.append(log_q[k])
            first += len(place)
        if self._with_support:
            every = TokenSets.joined(self._sets) if self._sets else None
            for output, steps in zip(outputs, drawn, strict=True):
                output.supports = self._supports(output.token_ids, steps, every)
        failed = [] if self._failed is None else self._failed.tolist()
        for row, output in enumerate(outputs):
            if failed and failed[row]:
                output.finish_reason = "error"
            elif output.token_ids and output.token_ids[-1] in self.rules.eos_ids:
                output.finish_reason = "eos"
            elif row in self._stopped:
                output.finish_reason = "stop"
        return outputs

    def _supports(self, token_ids: Sequence[int], steps: Sequence[int], every: TokenSets | None) -> TokenSets:
        """The sets that a row's tokens were drawn from, given their places among those of all rows."""
        if every is not None:
            return every.take(steps)
        if self.policy.is_greedy:
            return TokenSets.singletons(token_ids, self._d_vocab)
        return TokenSets.everything(len(token_ids), self._d_vocab)

    def _read_columns(self) -> Iterator[tuple[list[int], list[int], list[float], list[float]]]:
        """Every step's (rows, tokens, log p, log q) as lists."""
        if not self._columns:
            return
        sizes = [len(column[0]) for column in self._columns]
        rows, tokens = (torch.cat([c[k] for c in self._columns]).tolist() for k in (0, 1))
        log_ps, log_qs = [0.0] * len(rows), [0.0] * len(rows)
        if self.with_log_probs:
            log_ps = torch.cat([c[2] for c in self._columns]).tolist()
            if not self.policy.is_greedy:
                log_qs = torch.cat([c[3] for c in self._columns]).tolist()
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            yield rows[part], tokens[part], log_ps[part], log_qs[part]
            start += size

    def _draw(
        self, logits: Float[Tensor, "batch d_vocab"], seen: Tensor | None, keys: Int[Tensor, " rows"]
    ) -> tuple[Tensor, Int[Tensor, " batch"], Float[Tensor, " batch"] | None, Float[Tensor, " batch"] | None]:
        """Rows without finite logits; tokens, with their log p under the model and log q under the policy."""
        if self.policy.is_greedy and seen is None and runs_kernels(logits):
            from steerlab._kernels.greedy import most_probable

            tokens, log_p, broken = most_probable(logits)
            return broken, tokens, log_p, None
        broken = rows_not_finite(logits)
        return broken, *self._drawn(logits.masked_fill(broken[:, None], 0.0), seen, keys)

    def _drawn(
        self, logits: Float[Tensor, "batch d_vocab"], seen: Tensor | None, keys: Int[Tensor, " rows"]
    ) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"] | None, Float[Tensor, " batch"] | None]:
        """The last three of `_draw`; log q is None where it is 0."""
        wide = logits.to(torch.float32)
        adjusted = wide if seen is None else apply_repetition_penalty(wide, seen, self.policy)
        if self.policy.is_greedy:
            tokens = adjusted.argmax(dim=-1)
            if not self.with_log_probs:
                return tokens, None, None
            return tokens, chosen_log_probs(wide, tokens), None
        log_q = policy_log_probs(adjusted, self.policy)
        tokens = draw(log_q, keys)
        if self._with_support and truncates(self.policy):
            self._sets.append(sets_of(log_q > -math.inf))
        if not self.with_log_probs:
            return tokens, None, None
        return tokens, chosen_log_probs(wide, tokens), log_q.gather(-1, tokens[:, None])[:, 0]

    def _stop_strings(self, ended: Bool[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Rows whose text now contains a stop string; reads tokens back."""
        place, _, _, _ = self._columns[-1]
        stopped = []
        texts = self._texts()
        for row, over in zip(place.tolist(), ended.tolist(), strict=True):
            hit = not over and find_stop(texts[row], self.rules.strings) is not None
            if hit:
                self._stopped[row] = len(self._columns)
            stopped.append(hit)
        return torch.tensor(stopped, device=ended.device)

    def _texts(self) -> list[str]:
        """The text of every row so far."""
        fresh = self._columns[-1]
        self._ids = getattr(self, "_ids", [[] for _ in self.prompts])
        for row, token in zip(fresh[0].tolist(), fresh[1].tolist(), strict=True):
            if token >= 0:
                self._ids[row].append(token)
        return [after.text(ids) for after, ids in zip(self._after, self._ids, strict=True)]

    def _polls(self, index: int, device: torch.device) -> bool:
        """Whether to look, at this step, which rows have ended; on an accelerator that waits for the device."""
        return device.type == "cpu" or bool(self.rules.strings) or index % POLL_STEPS == POLL_STEPS - 1


def settled(
    tokens: Int[Tensor, " rows"],
    broken: Bool[Tensor, " rows"],
    ended: Bool[Tensor, " rows"],
    failed: Bool[Tensor, " rows"],
    eos: Int[Tensor, " ids"],
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Tokens of rows that go on, and what the next pass takes: -1 for rows that have ended.

    Args:
        tokens: drawn in each row.
        broken: rows whose logits are not finite, which end without a token.
        ended: rows that have ended; these and those that end now, in place.
        failed: rows that ended for such logits; likewise.
        eos: tokens that end a row.
    """
    if runs_kernels(tokens):
        from steerlab._kernels.greedy import settle

        return settle(tokens, broken, ended, failed, eos)
    failed |= broken & ~ended
    ended |= broken
    given = tokens.masked_fill(ended, -1)
    if len(eos):
        ended |= torch.isin(given, eos)
    return given, given.masked_fill(ended, -1)


def _seen(ids: Tensor, valid: Tensor, d_vocab: int) -> Tensor:
    """Which tokens each row holds."""
    seen = torch.zeros(ids.shape[0], d_vocab + 1, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids.masked_fill(~valid, d_vocab), True)[:, :d_vocab]


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text: of the tokenizer, the configuration and the generation configuration, if there."""
    return eos_ids_of(tokenizer, getattr(model, "config", None), getattr(model, "generation_config", None))
