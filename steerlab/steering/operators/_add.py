"""The operator that adds a vector."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Number
from steerlab.core.errors import PlanError
from steerlab.steering._strengths import check_unit, finite, strength
from steerlab.steering.operators._base import Direction, Operator, Unit
from steerlab.steering.operators._edit import Edit, Norm, edit_along
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Add(Operator):
    """Adds the vector: Δ = coef·v, or dose·median·u.

    Source:
        Turner et al. 2023, Activation Addition (arXiv:2308.10248); Rimsky et al. 2023 (arXiv:2312.06681).
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        check_unit(self.unit)
        object.__setattr__(self, "amount", finite(self.amount, self.unit))

    @override
    def terms(self, along: Direction) -> tuple[Term, ...]:
        length = along.median_norm if self.unit == "dose" else float(along.values.double().norm())
        return (Term(along.unit, Gate(self.amount * length)),)

    @override
    def constant(self, along: Direction) -> Float[Tensor, " d_model"]:
        if self.unit == "coef":
            return self.amount * along.values
        return self.amount * along.median_norm * along.unit

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "add", "amount": self.amount, "unit": self.unit}

    @override
    def told(self, scale: float) -> str:
        return f"add({self.unit}={scale * self.amount:g})"

    @classmethod
    def from_json(cls, data: Mapping[str, Any], hook_point: HookPoint) -> "Add":
        """The operator that `to_json` described."""
        return cls(data["amount"], data["unit"])

    def __str__(self) -> str:
        return self.told(1.0)


@explains_arguments
def add(
    vector: SteeringVector,
    *unnamed: Any,
    dose: Number | None = None,
    coef: Number | None = None,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: When | None = None,
) -> Edit:
    """Adds a vector to the stream at its hook point.

    Args:
        vector: what to add.
        unnamed: nothing; a strength without its unit is refused.
        dose: norm of what is added, in median norms of the stream there; negative reverses the direction.
        coef: raw coefficient: adds coef times the vector. Give exactly one of dose and coef.
        where: positions; by default the last prompt token and everything generated.
        norm: `keep` rescales the result to the norm the stream had.
        schedule: a factor over generated positions.
        when: a condition per row.

    Raises:
        PlanError: if not exactly one strength is given, or it is not finite.
    """
    if unnamed:
        raise PlanError(
            f"add takes its strength by name, got {unnamed[0]!r}: dose= (in median residual norms) or coef= (raw)."
        )
    amount, unit = strength("add", dose, coef)
    return edit_along(Add(amount, unit), vector, where, norm, schedule, when)
