"""Teacher forcing: quantities of every target token, prompts run once and shared by their targets."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerlab._runtime.backend import HookedModel
from steerlab._runtime.capturing import plan_hooks
from steerlab._runtime.growth import AnyRows, fresh_rows
from steerlab._runtime.rows import left_padded, right_padded
from steerlab._runtime.shared_prefix import shared_prefix
from steerlab.core._batching import batches_by_tokens
from steerlab.core._not_finite_errors import not_finite
from steerlab.core.errors import InputError, SteerlabError
from steerlab.core.receipts import Receipt
from steerlab.measures.log_probs import rows_not_finite
from steerlab.steering._plan_assignment import AssignedPlan
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._prompt_lookup import PromptContent, looks_at_prompts

Measures = Mapping[str, Callable[[Tensor, Tensor], Tensor]]


CACHED_PER_RUN = 2  # with 512-token contexts on a CPU faster than 1 and than 8: copies of the cache cost time as well


@dataclass(frozen=True)
class ForcedPair:
    """One context with one target, and where in the call it belongs."""

    context_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    prompt_index: int
    row_index: int


@dataclass(frozen=True)
class Budget:
    """How much runs at once.

    Attributes:
        tokens: tokens per pass, padding included.
        logit_bytes: bytes of float32 logits held at once.
    """

    tokens: int
    logit_bytes: int = 256 << 20

    def cost(self, n_run: int, n_cached: int) -> int:
        """What a row takes of the tokens per pass: those it runs, and a share of the cache that it holds a copy of.

        A cached token takes its keys and values only, less than the activations and attention scores of a token that
        runs.
        """
        return n_run + n_cached // CACHED_PER_RUN

    def logit_rows(self, d_vocab: int) -> int:
        """How many rows of logits fit."""
        return max(1, self.logit_bytes // (4 * d_vocab))


class TeacherForcing:
    """Measures of target tokens under one plan.

    Args:
        model: the model.
        assigned: the plan.
        measures: named functions of (logits [rows, d_vocab], tokens [rows]) → [rows] or [rows, anything]; e.g. the
            log-probability of each token.
        budget: how much runs at once.
        d_vocab: number of logits.
        progress: called with the number of pairs finished.
        contents: per prompt of the call, what `span` and `mask` positions look at.
    """

    def __init__(
        self,
        model: HookedModel,
        assigned: AssignedPlan,
        measures: Measures,
        budget: Budget,
        d_vocab: int,
        progress: Callable[[int], Any],
        contents: Sequence[PromptContent],
    ) -> None:
        self.model = model
        self.assigned = assigned
        self.measures = measures
        self.budget = budget
        self.logit_rows = budget.logit_rows(d_vocab)
        self.progress = progress
        self.contents = contents
        self.values: dict[int, dict[str, np.ndarray]] = {}
        self.n_measured: Counter[int] = Counter()
        self.receipts: list[Receipt] = []

    def run(self, pairs: Sequence[ForcedPair]) -> None:
        """Measures every pair; results are then in `values` (by row index) and `receipts`."""
        contexts: dict[tuple[tuple[int, ...], int | None], list[ForcedPair]] = {}
        by_prompt = looks_at_prompts(self.assigned.plan.sets)
        for pair in pairs:
            contexts.setdefault((pair.context_ids, pair.prompt_index if by_prompt else None), []).append(pair)
            self.values[pair.row_index] = {}
        unique = [(context, sharing) for (context, _), sharing in contexts.items()]
        prefix = self._prefix([context for context, _ in unique])
        done = 0 if prefix is None else prefix.n_tokens
        costs = [self.budget.cost(len(context) - done, done) for context, _ in unique]
        for batch in batches_by_tokens(costs, self.budget.tokens):
            self._run_contexts([unique[i] for i in batch], prefix)

    def _prefix(self, contexts: Sequence[tuple[int, ...]]) -> AnyRows | None:
        """One row that holds the beginning of all contexts, if it may run once for all of them."""
        length = shared_prefix(self.model.causal, self.assigned.plan, contexts)
        if not length:
            return None
        run = PlanRun(self.assigned.plan, 1)
        backend = self.model.exact_backend(plan_hooks(run))
        prefix = fresh_rows(backend.model, run, [len(contexts[0])], "block")
        with backend.attached(plan_hooks(run)):
            self._extend_in_blocks(prefix, *left_padded([contexts[0][:length]]))
        return prefix

    def _run_contexts(self, batch: list[tuple[tuple[int, ...], list[ForcedPair]]], prefix: AnyRows | None) -> None:
        contexts = [context for context, _ in batch]
        rows = self._fresh(batch) if prefix is None else prefix.selected([0] * len(batch), [len(c) for c in contexts])
        done = 0 if prefix is None else prefix.n_tokens
        backend = self.model.exact_backend(plan_hooks(rows.run))
        with backend.attached(plan_hooks(rows.run)):
            logits = self._extend_in_blocks(rows, *left_padded([context[done:] for context in contexts]))
        first = [(pair, 0, row, pair.target_ids[0]) for row, (_, pairs) in enumerate(batch) for pair in pairs]
        self._measure(first, logits)
        self._run_targets(rows, [(row, pair) for row, (_, pairs) in enumerate(batch) for pair in pairs])

    def _fresh(self, batch: list[tuple[tuple[int, ...], list[ForcedPair]]]) -> AnyRows:
        """Rows for contexts that run from their first token."""
        contents = [self.contents[pairs[0].prompt_index].before(context) for context, pairs in batch]
        run = PlanRun(self.assigned.plan, len(batch), contents)
        backend = self.model.exact_backend(plan_hooks(run))
        return fresh_rows(backend.model, run, [len(context) for context, _ in batch], "block")

    def _extend_in_blocks(self, rows: AnyRows, ids: Tensor, valid: Tensor) -> Tensor:
        """Runs long contexts block by block, so that attention scores stay small; logits of the last token."""
        logits = None
        width = max(1, self.budget.tokens // ids.shape[0])
        for start in range(0, ids.shape[1], width):
            logits = rows.extend(ids[:, start : start + width], valid[:, start : start + width], keep=1)
        assert logits is not None
        return logits[:, -1]

    def _run_targets(self, rows: AnyRows, pairs: list[tuple[int, ForcedPair]]) -> None:
        """Continues each context by its targets; a target's last token drives nothing and is not run."""
        short = [(row, pair) for row, pair in pairs if len(pair.target_ids) == 1]
        long = [(row, pair) for row, pair in pairs if len(pair.target_ids) > 1]
        if short:
            self._finish(rows.run.continued([row for row, _ in short]), [pair for _, pair in short])
        costs = [self.budget.cost(len(pair.target_ids), len(pair.context_ids)) for _, pair in long]
        for batch in batches_by_tokens(costs, self.budget.tokens):
            self._run_target_batch(rows, [long[i] for i in batch])

    def _run_target_batch(self, rows: AnyRows, batch: list[tuple[int, ForcedPair]]) -> None:
        chosen = rows.selected([row for row, _ in batch])
        pairs = [pair for _, pair in batch]
        ids, valid = right_padded([pair.target_ids[:-1] for pair in pairs])
        width = max(1, self.logit_rows // len(pairs))
        backend = self.model.exact_backend(plan_hooks(chosen.run))
        with backend.attached(plan_hooks(chosen.run)):
            for start in range(0, ids.shape[1], width):
                logits = chosen.extend(ids[:, start : start + width], valid[:, start : start + width])
                n_pos = logits.shape[1]
                following = [
                    (pair, start + 1 + offset, row * n_pos + offset, token)
                    for row, pair in enumerate(pairs)
                    for offset, token in enumerate(pair.target_ids[start + 1 : start + 1 + n_pos])
                ]
                self._measure(following, logits.flatten(0, 1))
        self._finish(chosen.run, pairs)

    def _measure(self, entries: Sequence[tuple[ForcedPair, int, int, int]], logits: Tensor) -> None:
        """Applies the measures to (pair, place in its target, row of logits, token), many at a time.

        A row of logits may serve several tokens.
        """
        for start in range(0, len(entries), self.logit_rows):
            part = entries[start : start + self.logit_rows]
            chosen = logits[torch.tensor([row for _, _, row, _ in part], device=logits.device)]
            tokens = torch.tensor([token for _, _, _, token in part], device=logits.device)
            self._check_finite(chosen, [pair for pair, _, _, _ in part])
            for name, measure in self.measures.items():
                found = as_values(name, measure(chosen, tokens), len(part))
                for (pair, place, _, _), value in zip(part, found, strict=True):
                    self._put(pair, name, place, value)
            self.n_measured.update(pair.row_index for pair, _, _, _ in part)

    def _check_finite(self, logits: Tensor, pairs: Sequence[ForcedPair]) -> None:
        """Checks that every row of logits is finite; the rows belong to the pairs one by one.

        Raises:
            NonFiniteError: otherwise; names the prompt and the row.
        """
        broken = rows_not_finite(logits)
        if bool(broken.any()):
            pair = pairs[int(broken.nonzero()[0])]
            what = f"The logits of prompt {pair.prompt_index} (row {pair.row_index})"
            raise not_finite(what, logits.dtype, steered=bool(len(self.assigned.plan)))

    def _put(self, pair: ForcedPair, name: str, place: int, value: np.ndarray) -> None:
        """Stores the values of one token; a pair's array is made when its first value comes."""
        found = self.values[pair.row_index]
        if name not in found:
            found[name] = np.full((len(pair.target_ids), *value.shape), np.nan, value.dtype)
        found[name][place] = value

    def _finish(self, run: PlanRun, pairs: Sequence[ForcedPair]) -> None:
        for pair in pairs:
            found = self.n_measured.pop(pair.row_index)
            if found != len(pair.target_ids):
                raise SteerlabError(f"{found} predictions were measured for {len(pair.target_ids)} target tokens.")
        self.receipts += run.receipts(
            token_ids=[(*pair.context_ids, *pair.target_ids[:-1]) for pair in pairs],
            prompt_lens=[len(pair.context_ids) for pair in pairs],
            prompt_indices=[pair.prompt_index for pair in pairs],
            row_indices=[pair.row_index for pair in pairs],
            plan_hash=self.assigned.given_hash,
        )
        self.progress(len(pairs))


def as_values(name: str, found: Any, n_rows: int) -> np.ndarray:
    """What a measure gave, on the CPU: float64 if it is one number per row, float32 if it is several.

    Raises:
        InputError: if it is not a tensor of one or two axes with an entry per row.
    """
    if not isinstance(found, Tensor) or found.ndim not in (1, 2) or found.shape[0] != n_rows:
        seen = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(
            f"The measure {name!r} returned {seen} for {n_rows} tokens; return a tensor [tokens] or [tokens, values]."
        )
    if found.is_complex():
        raise InputError(f"The measure {name!r} returned complex numbers; return real ones, e.g. two columns.")
    return found.detach().to("cpu", torch.float64 if found.ndim == 1 else torch.float32).numpy()
