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
from steerlab._runtime.contexts import Budget, Tokens, extend_in_blocks, prefix_row
from steerlab._runtime.growth import AnyRows, fresh_rows
from steerlab._runtime.rows import Rows, right_padded
from steerlab.core._batching import batches_by_tokens
from steerlab.core._not_finite_errors import not_finite
from steerlab.core.errors import InputError, SteerlabError
from steerlab.core.receipts import Receipt
from steerlab.measures.log_probs import rows_not_finite
from steerlab.steering._plan_assignment import AssignedPlan
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._prompt_lookup import PromptContent, looks_at_prompts

Measures = Mapping[str, Callable[[Tensor, Tensor], Tensor]]


@dataclass(frozen=True)
class ForcedPair:
    """One context with one target, and where in the call it belongs."""

    context_ids: Tokens
    target_ids: Tokens
    prompt_index: int
    row_index: int


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

    def run(self, pairs: Sequence[ForcedPair], lead: int = 0) -> None:
        """Measures every pair; results are then in `values` (by row index) and `receipts`.

        Args:
            pairs: the pairs.
            lead: how many tokens of each context run with its targets, 0 or 1. Conditions may need 0: what they read at
                a context's last token must be known before its targets run.
        """
        by_prompt = looks_at_prompts(self.assigned.plan.sets)
        starts: dict[tuple[Tokens, Any], list[ForcedPair]] = {}
        for pair in pairs:
            tokens = pair.context_ids[: len(pair.context_ids) - lead]
            content = (pair.prompt_index, pair.context_ids) if by_prompt else None
            starts.setdefault((tokens, content), []).append(pair)
            self.values[pair.row_index] = {}
        for members in [members for (tokens, _), members in starts.items() if not tokens]:
            self._run_targets(self._fresh([members]), [(0, pair) for pair in members], lead)
        unique = [(tokens, members) for (tokens, _), members in starts.items() if tokens]
        contexts = [members[0].context_ids for _, members in unique]
        prefix = prefix_row(self.model, self.assigned.plan, contexts, self.budget, own=1 + lead)
        done = 0 if prefix is None else prefix.n_tokens
        costs = [self.budget.cost(len(tokens) - done, done) for tokens, _ in unique]
        for batch in batches_by_tokens(costs, self.budget.tokens):
            self._run_starts([unique[i] for i in batch], prefix, lead)

    def go_on(self, begun: Rows, pairs: Sequence[tuple[int, ForcedPair]]) -> None:
        """Measures pairs whose contexts have run up to their last token, which this plan leaves alone until there.

        Args:
            begun: rows that have run without a plan.
            pairs: each pair with its row.
        """
        self.values.update({pair.row_index: {} for _, pair in pairs})
        self._run_targets(begun.under(PlanRun(self.assigned.plan, begun.run.n_rows)), pairs, lead=1)

    def _run_starts(self, batch: list[tuple[Tokens, list[ForcedPair]]], prefix: AnyRows | None, lead: int) -> None:
        """Runs contexts, all of each but its `lead` last tokens, and then their targets."""
        lens = [len(members[0].context_ids) for _, members in batch]
        rows = (
            self._fresh([members for _, members in batch]) if prefix is None else prefix.selected([0] * len(lens), lens)
        )
        done = 0 if prefix is None else prefix.n_tokens
        backend = self.model.exact_backend(plan_hooks(rows.run))
        with backend.attached(plan_hooks(rows.run)):
            logits = extend_in_blocks(rows, [tokens[done:] for tokens, _ in batch], self.budget)
        pairs = [(row, pair) for row, (_, members) in enumerate(batch) for pair in members]
        if not lead:
            self._measure([(pair, 0, row, pair.target_ids[0]) for row, pair in pairs], logits)
        self._run_targets(rows, pairs, lead)

    def _fresh(self, starts: Sequence[Sequence[ForcedPair]]) -> AnyRows:
        """Rows that have not begun, one for the pairs of each start."""
        firsts = [members[0] for members in starts]
        contents = [self.contents[pair.prompt_index].before(pair.context_ids) for pair in firsts]
        run = PlanRun(self.assigned.plan, len(firsts), contents)
        backend = self.model.exact_backend(plan_hooks(run))
        return fresh_rows(backend.model, run, [len(pair.context_ids) for pair in firsts], "block")

    def _run_targets(self, rows: AnyRows, pairs: Sequence[tuple[int, ForcedPair]], lead: int) -> None:
        """Continues rows by targets; a target's last token drives nothing and is not run.

        Args:
            rows: each has run a context, all of it but its `lead` last tokens.
            pairs: each pair with its row. What drives several alike, such as targets of one token, runs once.
            lead: 0 or 1.
        """
        runs: dict[tuple[int, Tokens], list[ForcedPair]] = {}
        for row, pair in pairs:
            driving = pair.context_ids[len(pair.context_ids) - lead :] + pair.target_ids[:-1]
            runs.setdefault((row, driving), []).append(pair)
        done = [(row, pair) for (row, driving), members in runs.items() for pair in members if not driving]
        if done:
            self._finish(rows.run.continued([row for row, _ in done]), [pair for _, pair in done])
        ahead = [(row, driving, members) for (row, driving), members in runs.items() if driving]
        costs = [self.budget.cost(len(driving), len(members[0].context_ids) - lead) for _, driving, members in ahead]
        for batch in batches_by_tokens(costs, self.budget.tokens):
            self._run_target_batch(rows, [ahead[i] for i in batch], lead)

    def _run_target_batch(self, rows: AnyRows, batch: list[tuple[int, Tokens, list[ForcedPair]]], lead: int) -> None:
        chosen = rows.selected([row for row, _, _ in batch])
        ids, valid = right_padded([driving for _, driving, _ in batch])
        width = max(1, self.logit_rows // len(batch))
        backend = self.model.exact_backend(plan_hooks(chosen.run))
        with backend.attached(plan_hooks(chosen.run)):
            for start in range(0, ids.shape[1], width):
                logits = chosen.extend(ids[:, start : start + width], valid[:, start : start + width])
                n_pos = logits.shape[1]
                first = start + 1 - lead
                following = [
                    (pair, first + offset, row * n_pos + offset, token)
                    for row, (_, _, members) in enumerate(batch)
                    for pair in members
                    for offset, token in enumerate(pair.target_ids[first : first + n_pos])
                ]
                self._measure(following, logits.flatten(0, 1))
        of = [row for row, (_, _, members) in enumerate(batch) for _ in members]
        self._finish(chosen.run.continued(of), [pair for _, _, members in batch for pair in members])

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
