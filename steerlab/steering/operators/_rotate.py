"""The operator that rotates the stream within a plane."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Number
from steerlab.core.errors import PlanError, VectorShapeError
from steerlab.steering._strengths import finite
from steerlab.steering.operators._base import Direction, Operator, Unit
from steerlab.steering.operators._edit import Edit, Norm, edit_along
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.packing import pack, unpack
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector

_PARALLEL = 1e-6


@dataclass(frozen=True)
class Rotate(Operator):
    """Rotates the stream by an angle in the plane of two vectors, from the first towards the second.

    With u the first vector's unit direction, w the second's part orthogonal to it, normalised, a = u·h and b = w·h,

        Δ = [(cos θ − 1)·a − sin θ·b]·u + [sin θ·a + (cos θ − 1)·b]·w.

    The norm is kept, and so is everything orthogonal to the plane. A plan's scale multiplies Δ, not the angle.

    Source:
        Vu and Nguyen 2025, Angular Steering (arXiv:2510.26243), section 4: a rotation in the plane of a feature
        direction and a second axis.

    Attributes:
        angle: radians.
        toward: the second vector.
    """

    angle: float
    toward: SteeringVector
    unit: Unit = "coef"

    def __post_init__(self) -> None:
        object.__setattr__(self, "angle", finite(self.angle, "angle (in radians)"))

    @property
    @override
    def others(self) -> Mapping[str, SteeringVector]:
        return {"toward": self.toward}

    @override
    def check(self, vector: SteeringVector) -> None:
        if self.toward.d_model != vector.d_model:
            raise VectorShapeError(
                f"rotate needs two vectors of one width, got [{vector.d_model}] and [{self.toward.d_model}]."
            )
        if 1 - abs(vector.cosine(self.toward)) < _PARALLEL:
            raise PlanError("rotate needs a plane, and its two vectors are parallel; pass another `toward`.")

    @override
    def terms(self, along: Direction) -> tuple[Term, ...]:
        u, w = along.unit, second_axis(along.unit, along.others["toward"])
        cos, sin = Gate(slope=math.cos(self.angle) - 1), Gate(slope=math.sin(self.angle))
        return (Term(u, cos, u), Term(u, Gate(slope=-sin.slope), w), Term(w, sin, u), Term(w, cos, w))

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "rotate", "angle": self.angle, "toward": pack(self.toward.values)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], hook_point: HookPoint) -> "Rotate":
        """The operator that `to_json` described; its second vector is placed at the hook point."""
        if data["toward"] is None:
            raise ValueError("a rotation has two vectors")
        return cls(data["angle"], SteeringVector(unpack(data["toward"]), hook_point))

    def __str__(self) -> str:
        return f"rotate({self.angle:g} rad)"


@explains_arguments
def rotate(
    vector: SteeringVector,
    toward: SteeringVector,
    *,
    angle: Number,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: When | None = None,
) -> Edit:
    """Rotates the stream in the plane of two vectors, from the first towards the second, at the first's hook point.

    Args:
        vector: first direction of the plane; its length does not matter.
        toward: second direction; only its part orthogonal to the first matters.
        angle: in radians.
        where: positions; by default the last prompt token and everything generated.
        norm: the rotation keeps the norm by itself; `keep` matters for plans scaled by something other than 1.
        schedule: a factor over generated positions, on Δ rather than on the angle.
        when: a condition per row.

    Raises:
        PlanError: for parallel vectors or an angle that is not finite.
        VectorShapeError: for vectors of different width.
    """
    if not isinstance(toward, SteeringVector):
        raise PlanError(f"toward takes a SteeringVector, got {type(toward).__name__}.")
    return edit_along(Rotate(finite(angle, "angle (in radians)"), toward), vector, where, norm, schedule, when)


def second_axis(unit: Float[Tensor, " d_model"], toward: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
    """The part of `toward` orthogonal to the unit direction, with norm 1; computed in float64."""
    first, second = unit.double(), toward.double()
    rest = second - (second @ first) / (first @ first) * first
    return (rest / torch.linalg.vector_norm(rest)).float()
