"""The operator that keeps the stream's projection on a direction within bounds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Number, as_number
from steerlab.core.errors import PlanError
from steerlab.steering._strengths import check_unit, finite
from steerlab.steering.operators._base import Direction, Operator, Unit, factor_of
from steerlab.steering.operators._edit import Edit, Norm, edit_along
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Clamp(Operator):
    """Keeps the component along the direction within bounds: Δ = (clip(u·h, lo, hi) − u·h) u."""

    lo: float
    hi: float
    unit: Unit

    def __post_init__(self) -> None:
        check_unit(self.unit)
        for name in ("lo", "hi"):
            bound = as_number(getattr(self, name), infinite=True)
            object.__setattr__(self, name, finite(getattr(self, name), name) if bound is None else bound)
        if math.isinf(self.lo) and math.isinf(self.hi):
            raise PlanError("clamp needs a bound: lo=, hi= or both.")
        if not self.lo <= self.hi:
            raise PlanError(f"clamp needs lo ≤ hi, got lo={self.lo!r} and hi={self.hi!r}.")

    @override
    def terms(self, along: Direction) -> tuple[Term, ...]:
        factor = factor_of(self.unit, along)
        gate = Gate(gain=1.0, lo=self.lo * factor, hi=self.hi * factor, slope=-1.0)
        return (Term(along.unit, gate, along.unit),)

    @override
    def to_json(self) -> dict[str, Any]:
        bounds = [None if math.isinf(bound) else bound for bound in (self.lo, self.hi)]
        return {"kind": "clamp", "lo": bounds[0], "hi": bounds[1], "unit": self.unit}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], hook_point: HookPoint) -> "Clamp":
        """The operator that `to_json` described."""
        return _clamp(data["lo"], data["hi"], data["unit"])

    def __str__(self) -> str:
        return f"clamp({self.lo:g}, {self.hi:g}, {self.unit})"


@explains_arguments
def clamp(
    vector: SteeringVector,
    lo: Number | None = None,
    hi: Number | None = None,
    *,
    unit: Unit = "coef",
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: When | None = None,
) -> Edit:
    """Keeps the stream's projection on a direction within bounds, at the vector's hook point.

    Args:
        vector: the direction; its length does not matter.
        lo: lower bound; None means none.
        hi: upper bound; None means none.
        unit: `coef`: bounds are values of u·h; `dose`: multiples of the median norm of the stream there.
        where: positions; by default the last prompt token and everything generated.
        norm: `keep` rescales the result to the norm the stream had.
        schedule: a factor over generated positions.
        when: a condition per row.

    Raises:
        PlanError: without a bound, or with lo > hi.
    """
    return edit_along(_clamp(lo, hi, unit), vector, where, norm, schedule, when)


def _clamp(lo: Number | None, hi: Number | None, unit: Unit) -> Clamp:
    low = -math.inf if lo is None else finite(lo, "lo")
    return Clamp(low, math.inf if hi is None else finite(hi, "hi"), unit)
