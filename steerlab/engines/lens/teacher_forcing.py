"""Teacher forcing: quantities of every target token, prompts run once and shared by their targets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steerlab.core.batching import batches_by_tokens
from steerlab.core.errors import SteerlabError
from steerlab.engines.lens.backends import exact_backend
from steerlab.engines.lens.capturing import plan_hooks
from steerlab.engines.lens.rows import Rows, left_padded, right_padded
from steerlab.steering.assign import AssignedPlan
from steerlab.steering.content import PromptContent, looks_at_prompts
from steerlab.steering.receipts import Receipt
from steerlab.steering.run import PlanRun

Measures = Mapping[str, Callable[[Tensor, Tensor], Tensor]]


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

    def logit_rows(self, d_vocab: int) -> int:
        """How many rows of logits fit."""
        return max(1, self.logit_bytes // (4 * d_vocab))


class TeacherForcing:
    """Measures of target tokens under one plan.

    Args:
        bridge: the TransformerBridge.
        assigned: the plan.
        measures: named functions of (logits [rows, d_vocab], tokens [rows]) → [rows]; they say what each token's
            prediction is worth, e.g. its log-probability.
        budget: how much runs at once.
        d_vocab: number of logits.
        progress: called with the number of pairs finished.
        contents: per prompt of the call, what `span` and `mask` positions look at.
    """

    def __init__(
        self,
        bridge: Any,
        assigned: AssignedPlan,
        measures: Measures,
        budget: Budget,
        d_vocab: int,
        progress: Callable[[int], Any],
        contents: Sequence[PromptContent],
    ) -> None:
        self.bridge = bridge
        self.assigned = assigned
        self.measures = measures
        self.budget = budget
        self.logit_rows = budget.logit_rows(d_vocab)
        self.progress = progress
        self.contents = contents
        self.values: dict[int, dict[str, list[float]]] = {}
        self.receipts: list[Receipt] = []

    def run(self, pairs: Sequence[ForcedPair]) -> None:
        """Measures every pair; results are then in `values` (by row index) and `receipts`."""
        contexts: dict[tuple[tuple[int, ...], int | None], list[ForcedPair]] = {}
        by_prompt = looks_at_prompts(self.assigned.plan.sets)
        for pair in pairs:
            contexts.setdefault((pair.context_ids, pair.prompt_index if by_prompt else None), []).append(pair)
            self.values[pair.row_index] = {name: [] for name in self.measures}
        unique = [(context, sharing) for (context, _), sharing in contexts.items()]
        for batch in batches_by_tokens([len(context) for context, _ in unique], self.budget.tokens):
            self._run_contexts([unique[i] for i in batch])

    def _run_contexts(self, batch: list[tuple[tuple[int, ...], list[ForcedPair]]]) -> None:
        contents = [self.contents[pairs[0].prompt_index].before(context) for context, pairs in batch]
        run = PlanRun(self.assigned.plan, len(batch), contents)
        prompt_lens = [len(context) for context, _ in batch]
        backend = exact_backend(self.bridge, plan_hooks(run))
        rows = Rows(backend.model, run, prompt_lens)
        with backend.attached(plan_hooks(run)):
            logits = self._extend_in_blocks(rows, *left_padded([context for context, _ in batch]))
        first = [(pair, row, pair.target_ids[0]) for row, (_, pairs) in enumerate(batch) for pair in pairs]
        self._measure(first, logits)
        self._run_targets(rows, [(row, pair) for row, (_, pairs) in enumerate(batch) for pair in pairs])

    def _extend_in_blocks(self, rows: Rows, ids: Tensor, valid: Tensor) -> Tensor:
        """Runs long contexts block by block, so that attention scores stay small; logits of the last token."""
        logits = None
        width = max(1, self.budget.tokens // ids.shape[0])
        for start in range(0, ids.shape[1], width):
            logits = rows.extend(ids[:, start : start + width], valid[:, start : start + width], keep=1)
        assert logits is not None
        return logits[:, -1]

    def _run_targets(self, rows: Rows, pairs: list[tuple[int, ForcedPair]]) -> None:
        """Continues each context by its targets; a target's last token drives nothing and is not run."""
        short = [(row, pair) for row, pair in pairs if len(pair.target_ids) == 1]
        long = [(row, pair) for row, pair in pairs if len(pair.target_ids) > 1]
        if short:
            self._finish(rows.run.continued([row for row, _ in short]), [pair for _, pair in short])
        sizes = [len(pair.context_ids) + len(pair.target_ids) for _, pair in long]
        for batch in batches_by_tokens(sizes, self.budget.tokens):
            self._run_target_batch(rows, [long[i] for i in batch])

    def _run_target_batch(self, rows: Rows, batch: list[tuple[int, ForcedPair]]) -> None:
        chosen = rows.selected([row for row, _ in batch])
        pairs = [pair for _, pair in batch]
        ids, valid = right_padded([pair.target_ids[:-1] for pair in pairs])
        width = max(1, self.logit_rows // len(pairs))
        backend = exact_backend(self.bridge, plan_hooks(chosen.run))
        with backend.attached(plan_hooks(chosen.run)):
            for start in range(0, ids.shape[1], width):
                logits = chosen.extend(ids[:, start : start + width], valid[:, start : start + width])
                n_pos = logits.shape[1]
                following = [
                    (pair, row * n_pos + offset, token)
                    for row, pair in enumerate(pairs)
                    for offset, token in enumerate(pair.target_ids[start + 1 : start + 1 + n_pos])
                ]
                self._measure(following, logits.flatten(0, 1))
        self._finish(chosen.run, pairs)

    def _measure(self, entries: Sequence[tuple[ForcedPair, int, int]], logits: Tensor) -> None:
        """Applies the measures to (pair, row of logits, token), many at a time; a row may serve several tokens."""
        for start in range(0, len(entries), self.logit_rows):
            part = entries[start : start + self.logit_rows]
            chosen = logits[torch.tensor([row for _, row, _ in part], device=logits.device)]
            tokens = torch.tensor([token for _, _, token in part], device=logits.device)
            for name, measure in self.measures.items():
                found = measure(chosen, tokens).double().tolist()
                for (pair, _, _), value in zip(part, found, strict=True):
                    self.values[pair.row_index][name].append(value)

    def _finish(self, run: PlanRun, pairs: Sequence[ForcedPair]) -> None:
        for pair in pairs:
            for name, values in self.values[pair.row_index].items():
                found = len(values)
                if found != len(pair.target_ids):
                    raise SteerlabError(f"{name}: {found} values for {len(pair.target_ids)} target tokens.")
        self.receipts += run.receipts(
            token_ids=[(*pair.context_ids, *pair.target_ids[:-1]) for pair in pairs],
            prompt_lens=[len(pair.context_ids) for pair in pairs],
            prompt_indices=[pair.prompt_index for pair in pairs],
            row_indices=[pair.row_index for pair in pairs],
            plan_hash=self.assigned.given_hash,
        )
        self.progress(len(pairs))
