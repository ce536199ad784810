"""Checks that a plan leaves the stream finite in the model's dtype.

What an edit adds by itself is known before anything runs: the vector of `add`, the projection that `set` and `clamp`
force. With s the largest factor it is multiplied by (the plan's scale times the schedule, never taken below 1, so that
the product is finite in whatever order it is formed), two bounds hold for the sum over a plan's edits:

- length ≤ 10¹⁸: a norm layer squares and sums the stream in float32, which ends at 3.4·10³⁸; the squares of 10¹⁸ leave
  a factor of 340 for the stream itself and for whatever later layers put on top.
- every component ≤ a quarter of the largest number of the model's dtype: 16,376 in float16. In bfloat16 and float32 the
  first bound is the stricter one.

What an edit takes from the stream (the projection that `ablate` removes, say) scales with it; a factor on it obeys the
same bounds for a stream of the median norm, or of norm 1 where that is not known. A row that overflows all the same,
because the stream was larger, ends with an error of its own when it runs.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import torch

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import PlanError
from steerlab.steering.operators._edit import Edit
from steerlab.steering.operators._form import Term
from steerlab.steering.operators.registry import is_shipped

MAX_LENGTH: Final = 1e18
_SHARE_OF_RANGE: Final = 0.25
_ORDINARY_FACTOR: Final = 2.0
"""Up to this factor, removing or replacing a projection does not lengthen the stream."""


class _Reach(NamedTuple):
    """How far edits can move the stream: the length of what they add, and its largest component."""

    length: float
    component: float

    def within(self, largest: float) -> bool:
        """Whether both bounds hold; not if either is NaN."""
        return self.length <= MAX_LENGTH and self.component <= largest


def check_finite_range(edits: Iterable[Edit], info: ModelInfo) -> None:
    """Checks that edits leave the stream finite in the model's dtype; their doses are resolved.

    Raises:
        PlanError: otherwise; names the edit that goes too far.
    """
    largest = torch.finfo(getattr(torch, info.dtype)).max * _SHARE_OF_RANGE
    length = component = 0.0
    for edit in edits:
        reach = _reach(edit)
        length, component = length + reach.length, component + reach.component
        if not (reach.within(largest) and _Reach(length, component).within(largest)):
            raise PlanError(
                f"{edit} leaves the finite range of {info.name}, which runs in {info.dtype}: it moves the stream by "
                f"{reach.length:.3g}, with components up to {reach.component:.3g}"
                + (f" ({length:.3g} and {component:.3g} with the edits before it)" if reach.within(largest) else "")
                + f"; lengths up to {MAX_LENGTH:.3g} and components up to {min(largest, MAX_LENGTH):.3g} leave the "
                "norm layers finite. Give a smaller strength."
            )


def _reach(edit: Edit) -> _Reach:
    along = edit.direction(torch.device("cpu"))
    peak = abs(edit.scale) * (1.0 if edit.schedule is None else edit.schedule.peak)
    typical = 1.0 if edit.median_norm is None else edit.median_norm
    if is_shipped(edit.operator):
        reaches = [_of_term(term) for term in edit.terms()]
        gain, added = sum(reach[0] for reach in reaches), sum(reach[1] for reach in reaches)
        widest = max(reach[2] for reach in reaches)
    else:
        constant = edit.operator.constant(along)
        gain, added = (1.0, 0.0) if constant is None else (0.0, float(constant.double().norm()))
        widest = 1.0
    moved = added * max(peak, 1.0) + (peak * gain * typical if peak * gain > _ORDINARY_FACTOR else 0.0)
    return _Reach(moved, moved * widest)


def _of_term(term: Term) -> tuple[float, float, float]:
    """By how much it multiplies the stream at most, how long what it adds is, and its largest component's share."""
    gate, length = term.gate, float(term.write.double().norm())
    reading = 0.0 if term.read is None else float(term.read.double().norm())
    gain = max(abs(gate.gain), abs(gate.slope), abs(gate.gain + gate.slope)) * reading * length
    added = abs(gate.amount) + abs(gate.gain) * max(gate.lo, -gate.hi, 0.0) + abs(gate.slope * term.bias)
    return gain, added * length, float(term.write.abs().max()) / length if length else 0.0
