"""Applies a plan: the reference implementation of steering, on plain tensors.

An engine makes a `PlanRun` for a batch of rows, states before each forward pass which tokens it holds
(`begin`), and calls `edit` at each hook point the plan touches. At a hook point, conditions are read first, then the
plan's edits apply in its order, each seeing the result of the one before. The run counts what it did, for the receipts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError, ReceiptError
from steerlab.core.receipts import EditReceipt, Receipt, mean_change
from steerlab.steering.operators._base import Direction
from steerlab.steering.operators._edit import Edit
from steerlab.steering.plan import Plan
from steerlab.steering.positions._by_tokens import by_tokens, trail_of
from steerlab.steering.positions._prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Where
from steerlab.steering.positions.condition import Gate
from steerlab.steering.positions.schedule import Schedule


class Tally(NamedTuple):
    """What one edit did in one pass; summed up when `counts` is called."""

    mask: Bool[Tensor, "batch pos"]
    size: Float[Tensor, "..."]
    norm: Float[Tensor, "batch pos"]
    kept: Int[Tensor, " batch"] | None


class _OnDevice:
    """An edit's vectors on the devices that it runs on, each copied there once."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._directions: dict[torch.device, Direction] = {}
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor] | None] = {}

    def constant(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """As `Edit.constant_delta`."""
        key = (device, dtype)
        if key not in self._constants:
            self._constants[key] = self._edit.constant_delta(device, dtype)
        return self._constants[key]

    def direction(self, device: torch.device) -> Direction:
        """As `Edit.direction`."""
        if device not in self._directions:
            self._directions[device] = self._edit.direction(device)
        return self._directions[device]


class PlanRun:
    """A plan applied to a batch of rows.

    Args:
        plan: a plan whose doses are resolved.
        n_rows: rows of the batch.
        contents: the prompt of each row; needed by plans with `span` or `mask` positions.

    Raises:
        PlanError: if such positions are not found in a prompt.
    """

    def __init__(self, plan: Plan, n_rows: int, contents: Sequence[PromptContent] | None = None) -> None:
        self.plan = plan
        self.n_rows = n_rows
        self.contents = contents
        self._on_device = [_OnDevice(edit) for edit in plan]
        self._marks = marks_for(plan.sets, contents)
        self._kept_marks = self._marks
        self._trail = trail_of(plan.sets, n_rows)
        self._gates = {condition: Gate(condition, n_rows) for condition in plan.conditions}
        self._unanswered: list[Tensor] = []
        self._rows: RowPositions | None = None
        self._kept: Tensor | None = None
        self._masks: dict[tuple[Where, Schedule | None, torch.device], Bool[Tensor, "batch pos"]] = {}
        self._passes: list[list[Tally]] = [[] for _ in plan]
        self._edited = torch.zeros(len(plan), n_rows, dtype=torch.long)
        self._changes = torch.zeros(len(plan), n_rows)

    @property
    def hook_points(self) -> list[HookPoint]:
        """Where `edit` must be called in every pass: what conditions read, and what edits change."""
        return list(dict.fromkeys([condition.hook_point for condition in self._gates] + self.plan.hook_points))

    @property
    def is_foreseen(self) -> bool:
        """Whether the prompts alone decide which generated tokens are edited."""
        return next(iter(by_tokens(self.plan.sets)), None) is None

    def begin(self, rows: RowPositions) -> RowPositions:
        """States which tokens the coming pass holds.

        Returns:
            The same with what the plan's sets look up: in the prompts of the rows, and in the tokens of earlier passes.
        """
        marked = rows if self._kept_marks is None else replace(rows, marks=self._kept_marks)
        self._rows = self._trail.follow(marked, self._kept)
        self._masks = {}
        return self._rows

    def edit(self, point: HookPoint, h: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The stream at a hook point after this plan's edits there, in its own dtype and on its own device."""
        if self._rows is None:
            raise ReceiptError("A plan's hook ran outside a pass; call begin first.")
        if h.shape[:2] != self._rows.positions.shape:
            raise ReceiptError(
                f"The stream at {point.name} has {tuple(h.shape[:2])} rows × positions, the pass was stated to have "
                f"{tuple(self._rows.positions.shape)}."
            )
        for gate in self._gates.values():
            if gate.condition.hook_point == point:
                gate.read(h, self._rows.on(h.device), self._kept)
        for index, edit in enumerate(self.plan):
            if edit.hook_point == point:
                h = self._apply(index, edit, h)
        return h

    def _apply(self, index: int, edit: Edit, h: Tensor) -> Tensor:
        assert self._rows is not None
        mask = self._mask(edit, h.device)
        placed = self._on_device[index]
        constant = placed.constant(h.device, h.dtype)
        if constant is None:
            factors = edit.factors(self._rows.on(h.device))
            wide = edit.delta(h.to(torch.float32), factors, placed.direction(h.device))
            delta, size = wide.to(h.dtype), torch.linalg.vector_norm(wide.detach(), dim=-1)
        else:
            delta, size = constant
        norm = torch.linalg.vector_norm(h.detach(), dim=-1, dtype=torch.promote_types(h.dtype, torch.float32))
        self._passes[index].append(Tally(self._rows.among_fresh(mask), size, norm, self._kept))
        return torch.where(mask[..., None], h + delta, h)

    def _mask(self, edit: Edit, device: torch.device) -> Tensor:
        """Which tokens of the pass the edit reaches; edits with the same positions share the result."""
        assert self._rows is not None
        key = (edit.where, edit.schedule, device)
        if key not in self._masks:
            self._masks[key] = edit.selects(self._rows.on(device))
        return self._where_it_holds(edit, self._rows.on(device), self._masks[key])

    def selects(self, edit: Edit, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        """Which tokens of a pass an edit reaches, for an operator that is carried out elsewhere."""
        return self._where_it_holds(edit, rows, edit.selects(rows))

    def _where_it_holds(self, edit: Edit, rows: RowPositions, mask: Tensor) -> Tensor:
        """Some tokens, those of rows left out in which the edit's condition fails."""
        if edit.when is None:
            return mask
        answers = {leaf: self._gates[leaf].answers(rows, self._kept) for leaf in edit.when.leaves}
        answered = torch.stack([known for known, _ in answers.values()]).all(dim=0)
        passed = edit.when.joined({leaf: answer for leaf, (_, answer) in answers.items()})
        self._unanswered.append((mask & ~answered[:, None]).any())
        return mask & (answered & passed)[:, None]

    def add_counts(self, index: int, edited: Int[Tensor, " batch"], changes: Float[Tensor, " batch"]) -> None:
        """Adds counts that a compiled operator made for the plan's edit of this index."""
        self._edited[index] += edited.cpu()
        self._changes[index] += changes.cpu()

    def narrow(self, kept: Int[Tensor, " rows"]) -> None:
        """States that the coming passes hold only these of the current rows; the others keep their counts."""
        self._kept = kept if self._kept is None else self._kept[kept.to(self._kept.device)]
        self._kept_marks = None if self._marks is None else self._marks.rows(self._kept)

    def counts(self) -> tuple[Int[Tensor, "edits batch"], Float[Tensor, "edits batch"]]:
        """Edited tokens and summed ‖Δh‖/‖h‖ so far, on the CPU."""
        for index, passes in enumerate(self._passes):
            for kept, edited, changes in map(_sums, _alike(passes)):
                place = slice(None) if kept is None else kept
                self._edited[index, place] += edited
                self._changes[index, place] += changes
            passes.clear()
        return self._edited.clone(), self._changes.clone()

    def continued(self, rows_of: Sequence[int]) -> "PlanRun":
        """A run for other rows that inherit the counts of this one's rows, e.g. targets that share a prompt's cache.

        Args:
            rows_of: for each new row, the row of this run it continues.
        """
        contents = None if self.contents is None else [self.contents[row] for row in rows_of]
        later = PlanRun(self.plan, len(rows_of), contents)
        index = torch.tensor(list(rows_of), dtype=torch.long)
        later._gates = {condition: gate.continued(index) for condition, gate in self._gates.items()}
        later._trail = self._trail.continued(rows_of)
        later._on_device = self._on_device
        later._unanswered = list(self._unanswered)
        edited, changes = self.counts()
        later._edited, later._changes = edited[:, index], changes[:, index]
        return later

    def receipts(
        self,
        *,
        token_ids: Sequence[Sequence[int] | np.ndarray],
        prompt_lens: Sequence[int],
        prompt_indices: Sequence[int],
        row_indices: Sequence[int],
        plan_hash: str | None,
    ) -> list[Receipt]:
        """Checked receipts, one per row.

        Args:
            token_ids: the tokens of each row that were run.
            prompt_lens: prompt length of each row.
            prompt_indices: the caller's prompt of each row.
            row_indices: the row's place in the call's result.
            plan_hash: of the plan as given.

        Raises:
            ReceiptError: if an edit reached other positions than the plan implies.
            PlanError: if an edit was reached before its condition was answered.
        """
        self._check_answers()
        edited, changes = self.counts()
        fired = {condition: gate.fired() for condition, gate in self._gates.items()}
        expected = self._expected(token_ids, prompt_lens)
        made = []
        for row in range(self.n_rows):
            entries = []
            for k, edit in enumerate(self.plan):
                answer = None if edit.when is None else edit.when.joined({c: fired[c][row] for c in edit.when.leaves})
                entries.append(
                    EditReceipt(
                        hook_point=edit.hook_point.name,
                        layer=edit.hook_point.layer,
                        operator=edit.operator.told(edit.scale),
                        vector=edit.vector.name,
                        edited=int(edited[k, row]),
                        expected=0 if answer is False else int(expected[k][row]),
                        mean_relative_change=mean_change(float(changes[k, row]), int(edited[k, row])),
                        condition_passed=answer,
                    )
                )
            receipt = Receipt(prompt_indices[row], row_indices[row], plan_hash, tuple(entries))
            made.append(receipt.check())
        return made

    def _expected(
        self, token_ids: Sequence[Sequence[int] | np.ndarray], prompt_lens: Sequence[int]
    ) -> list[Int[Tensor, " batch"]]:
        """How many tokens of each row each edit should have reached."""
        if not len(self.plan):
            return []
        rows = RowPositions.of_tokens(token_ids, prompt_lens, self._marks)
        return [edit.selects(rows).sum(dim=-1) for edit in self.plan]

    def _check_answers(self) -> None:
        if self._unanswered and bool(torch.stack([early.cpu() for early in self._unanswered]).any()):
            conditions = "; ".join(str(edit.when) for edit in self.plan if edit.when is not None)
            raise PlanError(
                f"An edit was reached before its condition was answered ({conditions}). Read the probe at the edit's "
                "layer or an earlier one, edit generated positions only, or, if a prompt longer than the engine's "
                "batch_tokens was run in blocks, raise batch_tokens."
            )


def _alike(passes: Sequence[Tally]) -> list[list[Tally]]:
    """Passes grouped into runs of consecutive ones over the same rows."""
    return [list(group) for _, group in itertools.groupby(passes, key=lambda tally: id(tally.kept))]


def _sums(passes: Sequence[Tally]) -> tuple[Tensor | None, Tensor, Tensor]:
    """Rows, edited tokens, and summed ‖Δh‖/‖h‖ of passes over the same rows, on the CPU."""
    mask = torch.cat([tally.mask for tally in passes], dim=1)
    norm = torch.cat([tally.norm for tally in passes], dim=1)
    size = torch.cat([tally.size.expand_as(tally.norm) for tally in passes], dim=1)
    change = (size / norm.clamp_min(torch.finfo(torch.float32).tiny)).masked_fill(~mask, 0.0)
    kept = passes[0].kept
    return None if kept is None else kept.cpu(), mask.sum(dim=1).cpu(), change.sum(dim=1).cpu()
