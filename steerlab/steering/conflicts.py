"""Checks a plan for edits that contradict each other.

Edits at one hook point apply in the plan's order, so `add` before `ablate` differs from `ablate` before `add`, and
both are plans. But `ablate`, `set` and `clamp` each demand where the projection on their direction ends. Two of them
along one direction, at a common position, whose demands no projection meets are a contradiction, and an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steerlab.core.errors import PlanError
from steerlab.steering.operators import Ablate, Clamp, Set
from steerlab.steering.operators._edit import Edit
from steerlab.steering.positions._by_tokens import ByTokens
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Marked, Where

_SAME_AXIS = 1 - 1e-6
_LONGEST = 48


def check_conflicts(edits: Sequence[Edit]) -> None:
    """Checks that no two edits contradict each other.

    Raises:
        PlanError: naming both edits and what to do.
    """
    for position, later in enumerate(edits):
        for earlier in edits[:position]:
            if _contradict(earlier, later):
                raise PlanError(
                    f"The plan's edits conflict: [{earlier}] and [{later}] demand different projections on one "
                    "direction at the same positions. Leave one out, or give them different positions."
                )


@dataclass(frozen=True)
class _Demand:
    """Bounds on the projection on a direction, in a unit, measured from a reference point."""

    lo: float
    hi: float
    unit: str
    reference: str | None

    def reversed(self) -> "_Demand":
        """The same seen along the opposite direction."""
        return _Demand(-self.hi, -self.lo, self.unit, self.reference)

    def excludes(self, other: "_Demand") -> bool:
        """Whether no projection meets both; zero is the same in every unit, other units are not compared."""
        alike = self.unit == other.unit or (self.lo, self.hi) == (0, 0) or (other.lo, other.hi) == (0, 0)
        return alike and self.reference == other.reference and (self.hi < other.lo or other.hi < self.lo)


def _demand(edit: Edit) -> _Demand | None:
    """The bounds that an edit demands; None if it has no fixed ones, or acts at less than full strength."""
    if edit.scale != 1 or edit.schedule is not None or edit.when is not None or edit.norm is not None:
        return None
    operator = edit.operator
    if isinstance(operator, Ablate):
        return _Demand(0.0, 0.0, operator.unit, None)
    if isinstance(operator, Clamp):
        return _Demand(operator.lo, operator.hi, operator.unit, None)
    if isinstance(operator, Set):
        about = None if operator.reference is None else operator.reference.hash
        return _Demand(operator.value, operator.value, operator.unit, about)
    return None


def _contradict(a: Edit, b: Edit) -> bool:
    first, second = _demand(a), _demand(b)
    if first is None or second is None or a.hook_point != b.hook_point or a.vector.d_model != b.vector.d_model:
        return False
    cosine = a.vector.cosine(b.vector)
    if abs(cosine) < _SAME_AXIS:
        return False
    return first.excludes(second if cosine > 0 else second.reversed()) and may_meet(a.where, b.where)


def may_meet(a: Where, b: Where) -> bool:
    """Whether two sets hold a common position in some short row.

    Sets that look at tokens or prompts are equal or not compared: whether they meet depends on the text.
    """
    if a == b:
        return True
    if any(isinstance(leaf, ByTokens | Marked) for where in (a, b) for leaf in where.leaves()):
        return False
    prompt_lens = list(range(1, _LONGEST // 2))
    rows = RowPositions.of_rows([_LONGEST] * len(prompt_lens), prompt_lens)
    return bool(torch.any(a.resolve(rows) & b.resolve(rows)))
