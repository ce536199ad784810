"""Receipts: what a plan really edited, counted inside the operator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steerlab.core._warning import warn
from steerlab.core.errors import ReceiptError
from steerlab.display import Fold, Piece, Shown, Table, count, figure


@dataclass(frozen=True)
class EditReceipt:
    """What one edit did to one row.

    Attributes:
        hook_point: name of the hook point.
        layer: its layer.
        operator: the operator with its real strength, the plan's scale counted in, as text.
        edited: tokens at which the operator acted.
        expected: tokens that the plan implies.
        mean_relative_change: mean over edited tokens of ‖Δh‖ / ‖h‖; NaN if there were none, or if the
            row's stream was not finite.
        condition_passed: what the edit's condition answered for the row; None without a condition. Where it failed,
            no token is expected to be edited.
        vector: name of the edit's vector; None if it has none.
    """

    hook_point: str
    layer: int
    operator: str
    edited: int
    expected: int
    mean_relative_change: float
    condition_passed: bool | None = None
    vector: str | None = None

    @property
    def title(self) -> str:
        """Operator, vector and hook point in words."""
        along = f" along {self.vector!r}" if self.vector else ""
        return f"{self.operator}{along} at {self.hook_point}"


@dataclass(frozen=True, repr=False)
class Receipt(Shown):
    """What a plan did to one row (one completion, one prompt-target pair, or one captured prompt).

    The last token of a row drives nothing, hence is never run nor counted: the last sampled token, the last target
    token.

    Attributes:
        prompt_index: which prompt.
        row_index: which row of the call's result.
        plan_hash: hash of the plan as the caller gave it; None for the unsteered arm.
        edits: one entry per edit of the plan, in its order.
    """

    prompt_index: int
    row_index: int
    plan_hash: str | None
    edits: tuple[EditReceipt, ...] = ()

    @property
    def edited(self) -> int:
        """Edits over all layers."""
        return sum(edit.edited for edit in self.edits)

    @property
    def expected(self) -> int:
        """Edits implied by the plan over all layers."""
        return sum(edit.expected for edit in self.edits)

    @property
    def mean_relative_change(self) -> float:
        """Mean ‖Δh‖ / ‖h‖ over all edits; NaN without any."""
        if self.edited == 0:
            return math.nan
        return math.fsum(e.mean_relative_change * e.edited for e in self.edits if e.edited) / self.edited

    def _finding(self) -> str:
        if self.plan_hash is None:
            return f"row {self.row_index}, unsteered"
        change = f", mean ‖Δh‖/‖h‖ {figure(self.mean_relative_change)}" if self.edited else ""
        return f"row {self.row_index}, {_edited_of(self.edited, self.expected)}{change}"

    def _pieces(self) -> Sequence[Piece]:
        return Receipts([self])._pieces()

    def check(self) -> "Receipt":
        """The receipt itself, if the plan edited exactly what it implies.

        Raises:
            ReceiptError: otherwise, naming hook point, expected and actual count.
        """
        for edit in self.edits:
            if edit.edited != edit.expected:
                raise ReceiptError(
                    f"Row {self.row_index}: {edit.title} should edit {edit.expected} tokens "
                    f"and edited {edit.edited}. The result cannot be trusted; another hook may skip or repeat it."
                )
        return self


class Receipts(Shown, tuple[Receipt, ...]):
    """The receipts of a call, one per row of its result: a tuple."""

    __slots__ = ()

    @property
    def edited(self) -> int:
        """Edits over all rows and layers."""
        return sum(receipt.edited for receipt in self)

    @property
    def table(self) -> Table:
        """A row per row of the result and edit."""
        rows = [
            (r.row_index, e.title, e.edited, e.expected, e.mean_relative_change, e.condition_passed)
            for r in self
            for e in r.edits
        ]
        conditional = any(row[-1] is not None for row in rows)
        columns = ["row", "edit", "edited tokens", "expected", "mean ‖Δh‖/‖h‖", "condition passed"]
        width = len(columns) if conditional else len(columns) - 1
        return Table(columns[:width], [row[:width] for row in rows])

    def _finding(self) -> str:
        if not any(receipt.edits for receipt in self):
            return f"{count(len(self), 'row')}, unsteered" if self else "nothing ran"
        return f"{count(len(self), 'row')}, {_edited_of(self.edited, sum(receipt.expected for receipt in self))}"

    def _pieces(self) -> Sequence[Piece]:
        table = self.table
        return [table] if table.rows else []


def receipts_fold(receipts: Sequence[Receipt], title: str = "receipts") -> list[Piece]:
    """What was edited in each row, to be opened on demand; nothing where no row was steered."""
    found = Receipts(receipts)
    return [Fold(f"{title}: {found._finding()}", found._pieces())] if found.table.rows else []


def _edited_of(edited: int, expected: int) -> str:
    """How many tokens were edited, and how many should have been if that is another number."""
    return count(edited, "edited token") + (f" of {figure(expected)} expected" if edited != expected else "")


@dataclass(frozen=True)
class Inherited:
    """Positions of a row that were not run, because the prefix cache held them as the same edits had left them.

    Attributes:
        row_index: which row of the call's result.
        positions: per edit of the plan, the edited positions that were inherited.
    """

    row_index: int
    positions: tuple[tuple[int, ...], ...]


def mean_change(total: float, edited: int) -> float:
    """The mean of summed relative changes; NaN without any, or if they are not finite."""
    return total / edited if edited and math.isfinite(total) else math.nan


def warn_if_idle(receipts: Sequence[Receipt]) -> None:
    """Warns of an edit whose positions selected no token in any row of a call, so that it did nothing there."""
    found: dict[tuple[str | None, int], int] = {}
    for receipt in receipts:
        for index, edit in enumerate(receipt.edits):
            key = (receipt.plan_hash, index)
            found[key] = found.get(key, 0) + edit.expected
            if edit.condition_passed is False:
                found[key] += 1  # a condition that failed is an answer, not a mistake
    idle = [(plan, index) for (plan, index), expected in found.items() if expected == 0]
    by_plan = {receipt.plan_hash: receipt for receipt in reversed(receipts)}
    for plan, index in idle:
        edit = by_plan[plan].edits[index]
        warn(
            f"{edit.title} selects no token in any row of this call, so it changed nothing; check its positions and "
            "its schedule."
        )
