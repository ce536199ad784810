"""Operators: the maps h → h + Δ(h) that an edit applies to the residual stream.

Each computes Δ in float32 from the stream at one hook point; `u` is the vector's unit direction. `scaled(k)` of a plan
multiplies Δ by k for every operator, so that scale 0 is always the unsteered model.

Strength comes in two units. A **coefficient** is raw: `add` adds coef·v, and bounds are values of the projection u·h. A
**dose** is measured in median norms of the stream at that hook point (on the shipped reference text, position 0 left
out): `add` adds a vector of norm dose·median along v, and bounds are multiples of the median.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from steerlab.core.errors import PlanError
from steerlab.steering.edit import Edit
from steerlab.steering.operator import Direction, Operator, Unit
from steerlab.steering.vectors import SteeringVector
from steerlab.steering.where import Where
from steerlab.steering.where import default as default_where


@dataclass(frozen=True)
class Add(Operator):
    """Adds the vector: Δ = coef·v, or dose·median·u.

    Source:
        Turner et al. 2023, Activation Addition (arXiv:2308.10248); Rimsky et al. 2023 (arXiv:2312.06681).
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        _check_unit(self.unit)
        object.__setattr__(self, "amount", _finite(self.amount, self.unit))

    @override
    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        return self.constant(along).expand_as(h)

    @override
    def constant(self, along: Direction) -> Float[Tensor, " d_model"]:
        if self.unit == "coef":
            return self.amount * along.values
        return self.amount * along.median_norm * along.unit

    @override
    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        length = along.median_norm if self.unit == "dose" else float(along.values.double().norm())
        return (self.amount * length, 0.0, -math.inf, math.inf)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "add", "amount": self.amount, "unit": self.unit}

    def __str__(self) -> str:
        return f"add({self.unit}={self.amount:g})"


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
        _check_unit(self.unit)
        if math.isinf(self.lo) and math.isinf(self.hi):
            raise PlanError("clamp needs a bound: lo=, hi= or both.")
        if not self.lo <= self.hi:
            raise PlanError(f"clamp needs lo ≤ hi, got lo={self.lo!r} and hi={self.hi!r}.")

    @override
    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        factor = along.median_norm if self.unit == "dose" else 1.0
        projection = h @ along.unit
        return (projection.clamp(self.lo * factor, self.hi * factor) - projection)[..., None] * along.unit

    @override
    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        factor = along.median_norm if self.unit == "dose" else 1.0
        return (0.0, 1.0, self.lo * factor, self.hi * factor)

    @override
    def to_json(self) -> dict[str, Any]:
        bounds = [None if math.isinf(bound) else bound for bound in (self.lo, self.hi)]
        return {"kind": "clamp", "lo": bounds[0], "hi": bounds[1], "unit": self.unit}

    def __str__(self) -> str:
        return f"clamp({self.lo:g}, {self.hi:g}, {self.unit})"


def add(
    vector: SteeringVector, *, dose: float | None = None, coef: float | None = None, where: Where | None = None
) -> Edit:
    """Adds a vector to the stream at its hook point.

    Args:
        vector: what to add.
        dose: norm of what is added, in median norms of the stream there; negative reverses the direction.
        coef: raw coefficient: adds coef times the vector. Give exactly one of dose and coef.
        where: positions; by default the last prompt token and everything generated.

    Raises:
        PlanError: if not exactly one strength is given, or it is not finite.
    """
    if (dose is None) == (coef is None):
        raise PlanError(
            "add takes exactly one strength: dose= (in median residual norms) or coef= (raw), got "
            f"dose={dose!r} and coef={coef!r}."
        )
    operator = Add(coef, "coef") if coef is not None else Add(dose, "dose")  # pyright: ignore[reportArgumentType]
    return _edit(operator, vector, where)


def ablate(vector: SteeringVector, *, where: Where | None = None) -> Edit:
    """Removes the stream's component along a direction, at the vector's hook point.

    Args:
        vector: the direction; its length does not matter.
        where: positions; by default the last prompt token and everything generated.
    """
    return _edit(Ablate(), vector, where)


def clamp(
    vector: SteeringVector,
    lo: float | None = None,
    hi: float | None = None,
    *,
    unit: Unit = "coef",
    where: Where | None = None,
) -> Edit:
    """Keeps the stream's projection on a direction within bounds, at the vector's hook point.

    Args:
        vector: the direction; its length does not matter.
        lo: lower bound; None means none.
        hi: upper bound; None means none.
        unit: `coef`: bounds are values of u·h; `dose`: multiples of the median norm of the stream there.
        where: positions; by default the last prompt token and everything generated.

    Raises:
        PlanError: without a bound, or with lo > hi.
    """
    return _edit(_clamp(lo, hi, unit), vector, where)


def operator_from_json(data: dict[str, Any]) -> Operator:
    """The operator that `to_json` described.

    Raises:
        PlanError: if the description is not one of ours.
    """
    try:
        kind = data["kind"]
        if kind == "add":
            return Add(data["amount"], data["unit"])
        if kind == "ablate":
            return Ablate()
        if kind == "clamp":
            return _clamp(data["lo"], data["hi"], data["unit"])
    except (KeyError, TypeError) as error:
        raise PlanError(f"Not a description of an operator: {data!r:.120}.") from error
    raise PlanError(f"Unknown operator {kind!r}; this version knows add, ablate and clamp.")


def _edit(operator: Operator, vector: SteeringVector, where: Where | None) -> Edit:
    if not isinstance(vector, SteeringVector):
        raise PlanError(
            f"An edit takes a SteeringVector, got {type(vector).__name__}; "
            "wrap a tensor with SteeringVector.from_tensor(tensor, layer=…), or choose a layer of a VectorSet."
        )
    if where is not None and not isinstance(where, Where):
        raise PlanError(f"where takes positions such as sl.where.generated(), got {where!r}.")
    return Edit(operator, vector, default_where() if where is None else where)


def _clamp(lo: float | None, hi: float | None, unit: Unit) -> Clamp:
    low = -math.inf if lo is None else _finite(lo, "lo")
    return Clamp(low, math.inf if hi is None else _finite(hi, "hi"), unit)


def _check_unit(unit: str) -> None:
    if unit not in ("dose", "coef"):
        raise PlanError(f"unit is 'dose' or 'coef', got {unit!r}.")


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise PlanError(f"{name} must be a finite number, got {value!r}.")
    return float(value)
