"""Operators: the maps h → h + Δ(h) that an edit applies to the residual stream.

Each computes Δ in float32 from the stream at one hook point; `u` is the vector's unit direction. `scaled(k)` of a plan
multiplies Δ by k for every operator, so that scale 0 is always the unsteered model. The formulas are in the classes:
`translation.Add`, `projection.Ablate`, `Clamp` and `Set`, `rotation.Rotate`.

Strength comes in two units. A **coefficient** is raw: `add` adds coef·v, and bounds and targets are values of the
projection u·h. A **dose** is measured in median norms of the stream at that hook point (on the shipped reference text,
position 0 left out): `add` adds a vector of norm dose·median along v, and bounds and targets are multiples of the
median.

Every operator takes four options:

- `where`: positions, or the name of a simple set ("all"); by default the last prompt token and everything generated.
- `norm="keep"`: the edited stream is given the norm it had, at every scale.
- `schedule`: a factor over generated positions, see `steerlab.steering.schedule`.
- `when`: a condition answered per row, see `steerlab.steering.condition`.
"""

import math
from typing import Any

from steerlab.core.arguments import explains_arguments
from steerlab.core.errors import PlanError, SteerlabError
from steerlab.core.hook_points import HookPoint
from steerlab.core.numbers import Number
from steerlab.steering.condition import Condition
from steerlab.steering.edit import Edit, Norm
from steerlab.steering.operator import Operator, Unit
from steerlab.steering.packing import unpack
from steerlab.steering.projection import Ablate, Clamp, Set
from steerlab.steering.registry import SHIPPED, read_registered
from steerlab.steering.rotation import Rotate
from steerlab.steering.schedule import Schedule
from steerlab.steering.strengths import finite
from steerlab.steering.translation import Add
from steerlab.steering.vectors import SteeringVector
from steerlab.steering.where import WhereLike, as_where
from steerlab.steering.where import default as default_where


@explains_arguments
def add(
    vector: SteeringVector,
    *unnamed: Any,
    dose: Number | None = None,
    coef: Number | None = None,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: Condition | None = None,
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
    amount, unit = _strength("add", dose, coef)
    return _edit(Add(amount, unit), vector, where, norm, schedule, when)


@explains_arguments
def ablate(
    vector: SteeringVector,
    *,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: Condition | None = None,
) -> Edit:
    """Removes the stream's component along a direction, at the vector's hook point.

    Args:
        vector: the direction; its length does not matter.
        where: positions; by default the last prompt token and everything generated.
        norm: `keep` rescales the result to the norm the stream had.
        schedule: a factor over generated positions.
        when: a condition per row.
    """
    return _edit(Ablate(), vector, where, norm, schedule, when)


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
    when: Condition | None = None,
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
    return _edit(_clamp(lo, hi, unit), vector, where, norm, schedule, when)


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
    when: Condition | None = None,
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
    amount, unit = _strength("set", dose, coef if value is None else value)
    if reference is not None and not isinstance(reference, SteeringVector):
        raise PlanError(
            f"reference takes a SteeringVector, got {type(reference).__name__}; wrap a tensor with "
            "SteeringVector.from_tensor(tensor, layer=…)."
        )
    return _edit(Set(amount, unit, reference), vector, where, norm, schedule, when)


@explains_arguments
def rotate(
    vector: SteeringVector,
    toward: SteeringVector,
    *,
    angle: Number,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: Condition | None = None,
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
    return _edit(Rotate(finite(angle, "angle (in radians)"), toward), vector, where, norm, schedule, when)


def operator_from_json(data: dict[str, Any], hook_point: HookPoint = HookPoint(0, "resid_post")) -> Operator:  # noqa: B008
    """The operator that `to_json` described; its further vectors are placed at the hook point.

    Raises:
        PlanError: if the description is neither one of ours nor of an operator that was registered.
    """

    def other(name: str) -> SteeringVector | None:
        return None if data[name] is None else SteeringVector(unpack(data[name]), hook_point)

    try:
        kind = data["kind"]
        if kind == "add":
            return Add(data["amount"], data["unit"])
        if kind == "ablate":
            return Ablate()
        if kind == "clamp":
            return _clamp(data["lo"], data["hi"], data["unit"])
        if kind == "set":
            return Set(data["value"], data["unit"], other("reference"))
        if kind == "rotate":
            toward = other("toward")
            if toward is not None:
                return Rotate(data["angle"], toward)
        if kind not in SHIPPED:
            return read_registered(data, hook_point)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SteerlabError):
            raise
        raise PlanError(f"Not a description of an operator: {data!r:.120}.") from error
    raise PlanError(f"Not a description of an operator: {data!r:.120}.")


def _edit(
    operator: Operator,
    vector: SteeringVector,
    where: WhereLike,
    norm: Norm | None,
    schedule: Schedule | None,
    when: Condition | None,
) -> Edit:
    if not isinstance(vector, SteeringVector):
        raise PlanError(
            f"An edit takes a SteeringVector, got {type(vector).__name__}; "
            "wrap a tensor with SteeringVector.from_tensor(tensor, layer=…), or choose a layer of a VectorSet."
        )
    places = as_where(where, default_where())
    return Edit(operator, vector, places, norm=norm, schedule=schedule, when=when)


def _strength(operator: str, dose: Number | None, coef: Number | None) -> tuple[float, Unit]:
    if (dose is None) == (coef is None):
        raise PlanError(
            f"{operator} takes exactly one strength: dose= (in median residual norms) or coef= (raw), got "
            f"dose={dose!r} and coef={coef!r}."
        )
    return (finite(dose, "dose"), "dose") if coef is None else (finite(coef, "coef"), "coef")


def _clamp(lo: Number | None, hi: Number | None, unit: Unit) -> Clamp:
    low = -math.inf if lo is None else finite(lo, "lo")
    return Clamp(low, math.inf if hi is None else finite(hi, "hi"), unit)
