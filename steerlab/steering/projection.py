"""Operators on the stream's projection on a direction: remove it, bound it, set it. `u` is the unit direction."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from steerlab.core.errors import PlanError, VectorShapeError
from steerlab.core.numbers import as_number
from steerlab.steering.operator import Direction, Operator, Unit, factor_of
from steerlab.steering.packing import pack
from steerlab.steering.strengths import check_unit, finite
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Ablate(Operator):
    """Removes the component along the direction: Δ = −(u·h) u.

    Source:
        Arditi et al. 2024, Refusal is mediated by a single direction (arXiv:2406.11717), section 2.4.
    """

    unit: Unit = "coef"

    @override
    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        return -(h @ along.unit)[..., None] * along.unit

    @override
    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        return (0.0, 1.0, 0.0, 0.0)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "ablate"}

    def __str__(self) -> str:
        return "ablate()"


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
    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        factor = factor_of(self.unit, along)
        projection = h @ along.unit
        return (projection.clamp(self.lo * factor, self.hi * factor) - projection)[..., None] * along.unit

    @override
    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        factor = factor_of(self.unit, along)
        return (0.0, 1.0, self.lo * factor, self.hi * factor)

    @override
    def to_json(self) -> dict[str, Any]:
        bounds = [None if math.isinf(bound) else bound for bound in (self.lo, self.hi)]
        return {"kind": "clamp", "lo": bounds[0], "hi": bounds[1], "unit": self.unit}

    def __str__(self) -> str:
        return f"clamp({self.lo:g}, {self.hi:g}, {self.unit})"


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
    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        return (self._target(along) - h @ along.unit)[..., None] * along.unit

    @override
    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        target = float(self._target(along))
        return (0.0, 1.0, target, target)

    def _target(self, along: Direction) -> Any:
        wanted = self.value * factor_of(self.unit, along)
        if self.reference is None:
            return wanted
        return wanted + along.others["reference"].double() @ along.unit.double()

    @override
    def to_json(self) -> dict[str, Any]:
        about = None if self.reference is None else pack(self.reference.values)
        return {"kind": "set", "value": self.value, "unit": self.unit, "reference": about}

    def __str__(self) -> str:
        about = "" if self.reference is None else ", reference"
        return f"set({self.unit}={self.value:g}{about})"
