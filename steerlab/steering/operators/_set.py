"""The operator that sets the stream's projection on a direction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Number
from steerlab.core.errors import PlanError, VectorShapeError
from steerlab.steering._strengths import check_unit, finite, strength
from steerlab.steering.operators._base import Direction, Operator, Unit, factor_of
from steerlab.steering.operators._edit import Edit, Norm, edit_along
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.packing import pack, unpack
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Set(Operator):
    """Sets the component along the direction: Δ = (c + u·r − u·h) u, after which u·(h − r) = c.

    Without a reference point r is 0, and the projection u·h itself becomes c. With one it is an affine edit: c = 0
    moves the stream to the hyperplane through r, e.g. through the mean of the negative prompts.

    Source:
        Marshall et al. 2024, Refusal in LLMs is an Affine Function (arXiv:2411.09003): affine concept editing, the
        projection removed, that of a reference point put in its place, and a multiple of the direction added.
    """

    value: float
    unit: Unit
    reference: SteeringVector | None = None

    def __post_init__(self) -> None:
        check_unit(self.unit)
        object.__setattr__(self, "value", finite(self.value, "the target of set"))

    @property
    @override
    def others(self) -> Mapping[str, SteeringVector]:
        return {} if self.reference is None else {"reference": self.reference}

    @override
    def check(self, vector: SteeringVector) -> None:
        if self.reference is not None and self.reference.d_model != vector.d_model:
            raise VectorShapeError(
                f"The reference point of set has shape [{self.reference.d_model}], the vector [{vector.d_model}]."
            )

    @override
    def terms(self, along: Direction) -> tuple[Term, ...]:
        target = self.value * factor_of(self.unit, along)
        if self.reference is not None:
            target += float(along.others["reference"].double() @ along.unit.double())
        return (Term(along.unit, Gate(target, slope=-1.0), along.unit),)

    @override
    def to_json(self) -> dict[str, Any]:
        about = None if self.reference is None else pack(self.reference.values)
        return {"kind": "set", "value": self.value, "unit": self.unit, "reference": about}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], hook_point: HookPoint) -> "Set":
        """The operator that `to_json` described; its reference is placed at the hook point."""
        packed = data["reference"]
        reference = None if packed is None else SteeringVector(unpack(packed), hook_point)
        return cls(data["value"], data["unit"], reference)

    def __str__(self) -> str:
        about = "" if self.reference is None else ", reference"
        return f"set({self.unit}={self.value:g}{about})"


@explains_arguments
def set(
    vector: SteeringVector,
    value: Number | None = None,
    *,
    dose: Number | None = None,
    coef: Number | None = None,
    reference: SteeringVector | None = None,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: When | None = None,
) -> Edit:
    """Sets the stream's projection on a direction to a value, at the vector's hook point: an affine edit.

    Args:
        vector: the direction; its length does not matter.
        value: the projection wanted, a value of u·h; the same as `coef`.
        dose: the projection wanted, in median norms of the stream there.
        coef: the projection wanted, a value of u·h. Give exactly one of value, dose and coef.
        reference: a point r of the stream; then u·(h − r) becomes the value rather than u·h.
        where: positions; by default the last prompt token and everything generated.
        norm: `keep` rescales the result to the norm the stream had (and so changes the projection again).
        schedule: a factor over generated positions.
        when: a condition per row.

    Raises:
        PlanError: if not exactly one target is given, or it is not finite.
        VectorShapeError: for a reference point of another width.
    """
    if value is not None and coef is not None:
        raise PlanError(f"set takes one target, got value={value!r} and coef={coef!r}, which mean the same.")
    amount, unit = strength("set", dose, coef if value is None else value)
    if reference is not None and not isinstance(reference, SteeringVector):
        raise PlanError(
            f"reference takes a SteeringVector, got {type(reference).__name__}; wrap a tensor with "
            "SteeringVector.from_tensor(tensor, layer=…)."
        )
    return edit_along(Set(amount, unit, reference), vector, where, norm, schedule, when)
