"""One edit of a plan: an operator along a vector, at positions, with a scale."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError
from steerlab.steering._strengths import finite
from steerlab.steering.operators._base import Direction, Operator
from steerlab.steering.operators._form import Term
from steerlab.steering.operators.registry import check_operator
from steerlab.steering.positions._by_tokens import spell
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Where
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike, as_where, default
from steerlab.steering.vectors import SteeringVector

Norm: TypeAlias = Literal["keep"]


@dataclass(frozen=True)
class Edit:
    """An operator along a vector, at positions.

    With D = scale·schedule(j)·Δ(h), the stream becomes h + D; with `norm="keep"` it becomes (h + D)·‖h‖/‖h + D‖, so
    that the norm is kept at every scale. Where the condition fails, nothing happens.

    Attributes:
        operator: the map h → Δ(h).
        vector: the direction, with its hook point.
        where: the positions.
        scale: multiplies Δ.
        median_norm: of the stream at the hook point, once known.
        norm: `keep` to give the edited stream the norm it had.
        schedule: a factor on Δ over the generated positions.
        when: a condition, or several joined, answered per row.
    """

    operator: Operator
    vector: SteeringVector
    where: Where
    scale: float = 1.0
    median_norm: float | None = None
    norm: Norm | None = None
    schedule: Schedule | None = None
    when: When | None = None

    def __post_init__(self) -> None:
        check_operator(self.operator)
        vector = self.vector
        card_applies = vector.card.extracted_at == vector.hook_point.name
        if self.median_norm is None and self.needs_median_norm and card_applies:
            object.__setattr__(self, "median_norm", vector.card.median_norm)
        object.__setattr__(self, "scale", finite(self.scale, "The scale of an edit"))
        if self.median_norm is not None:
            median = finite(self.median_norm, f"The median norm at {vector.hook_point.name}")
            if median <= 0:
                raise PlanError(f"The median norm at {vector.hook_point.name} is a number > 0, got {median!r}.")
            object.__setattr__(self, "median_norm", median)
        if self.norm not in (None, "keep"):
            raise PlanError(f"norm is 'keep' or None, got {self.norm!r}.")
        for name, kind in (("schedule", Schedule), ("when", When)):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), kind):
                raise PlanError(f"{name} takes what sl.{name} makes, got {getattr(self, name)!r:.60}.")
        self.operator.check(vector)

    @property
    def hook_point(self) -> HookPoint:
        """Where in the model it acts."""
        return self.vector.hook_point

    @property
    def vectors(self) -> tuple[SteeringVector, ...]:
        """Its own vector, those of its operator, and its condition's probe."""
        probes = () if self.when is None else tuple(leaf.probe for leaf in self.when.leaves)
        return (self.vector, *self.operator.others.values(), *probes)

    @property
    def needs_median_norm(self) -> bool:
        """Whether a strength is given as a dose."""
        return self.operator.unit == "dose"

    def scaled(self, factor: float) -> "Edit":
        """The same edit with Δ multiplied by `factor`."""
        return replace(self, scale=self.scale * factor)

    def with_vector(self, vector: SteeringVector) -> "Edit":
        """The same operator, strength and positions along another vector; a dose is measured anew if it moved."""
        keep = self.median_norm if vector.hook_point == self.hook_point else None
        return replace(self, vector=vector, median_norm=keep)

    def with_median_norm(self, value: float) -> "Edit":
        """The same edit, its dose resolved."""
        return replace(self, median_norm=value)

    def spelled(self, tokenizer: Any) -> "Edit":
        """The same edit with the texts that its positions name as token ids; see `positions._by_tokens.spell`."""
        when = None if self.when is None else self.when.spelled(tokenizer)
        return replace(self, where=spell(self.where, tokenizer), when=when)

    def selects(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        """Which of a pass's tokens it edits, its condition left aside."""
        return chosen(self.where, self.schedule, rows)

    def factors(self, rows: RowPositions) -> Float[Tensor, "batch pos"] | None:
        """The schedule's factor for each of a pass's tokens; None without a schedule."""
        return None if self.schedule is None else self.schedule.factor(rows.generated_index)

    def delta(
        self,
        h: Float[Tensor, "*batch d_model"],
        factors: Float[Tensor, "*batch"] | None = None,
        along: Direction | None = None,
    ) -> Float[Tensor, "*batch d_model"]:
        """What is added to the stream, float32.

        Args:
            h: the stream, float32.
            factors: the schedule's factor for each token; None for 1.
            along: the vectors on the stream's device, if they are there already.

        Raises:
            PlanError: if the operator gives no tensor, or one that does not broadcast to the stream.
        """
        change = self.scale * self._checked("delta", self.operator.delta(h, along or self.direction(h.device)), h.shape)
        if factors is not None:
            change = factors[..., None] * change
        return change if self.norm is None else norm_kept(h, change)

    def constant_delta(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Scaled Δ [d_model] in a dtype, and its norm, if what is added does not depend on stream or position."""
        if self.norm is not None or self.schedule is not None:
            return None
        constant = self.operator.constant(self.direction(device))
        if constant is None:
            return None
        self._checked("constant", constant, self.vector.values.shape)
        with torch.inference_mode(False):
            scaled = self.scale * constant
            return scaled.to(dtype), scaled.norm()

    def terms(self) -> tuple[Term, ...]:
        """The summands of its operator's Δ on the CPU, its own scale and options left aside; see `operators._form`.

        Raises:
            PlanError: for an operator that is not of this form.
        """
        return self.direction(torch.device("cpu")).terms_of(self.operator)

    def _checked(self, method: str, found: object, wanted: torch.Size) -> Tensor:
        """What a method of the operator gave, if it is a tensor that broadcasts to a shape."""
        name = f"{method} of the operator {type(self.operator).__name__}"
        if not isinstance(found, Tensor):
            raise PlanError(f"{name} gives a tensor of shape {list(wanted)}, got {found!r:.60}.")
        sizes = zip(reversed(found.shape), reversed(wanted), strict=False)
        if len(found.shape) > len(wanted) or any(size not in (1, whole) for size, whole in sizes):
            raise PlanError(
                f"{name} gives a tensor of shape {list(wanted)}, or one that broadcasts to it; got {list(found.shape)}."
            )
        return found

    def direction(self, device: torch.device) -> Direction:
        """The vectors, copied to a device.

        Raises:
            PlanError: for a dose that is not resolved.
        """
        if self.needs_median_norm and self.median_norm is None:
            raise PlanError(f"{self} gives a dose, but the median norm there is unknown; resolve the plan first.")
        norm = math.nan if self.median_norm is None else self.median_norm
        with torch.inference_mode(False):
            values, unit = self.vector.values.to(device), self.vector.unit.to(device)
            others = {name: vector.values.to(device) for name, vector in self.operator.others.items()}
        return Direction(values, unit, norm, others)

    def content(self) -> list[Any]:
        """What identifies the edit: operator, vector, positions, scale, the norm its dose refers to, and options."""
        always = [self.operator.to_json(), self.vector.hash, self.where.to_json(), self.scale, self.median_norm]
        options = {
            "norm": self.norm,
            "schedule": None if self.schedule is None else self.schedule.to_json(),
            "when": None if self.when is None else self.when.content(),
        }
        given = {name: value for name, value in options.items() if value is not None}
        return [*always, given] if given else always

    def __str__(self) -> str:
        times = "" if self.scale == 1 else f" × {self.scale:g}"
        names = [("along", self.vector.name), *((role, other.name) for role, other in self.operator.others.items())]
        times += "".join(f" {role} {name!r}" for role, name in names if name)
        options = [f"norm={self.norm}"] * (self.norm is not None)
        options += [f"schedule={self.schedule}"] * (self.schedule is not None)
        options += [f"when {self.when}"] * (self.when is not None)
        return "; ".join([f"{self.operator}{times} at {self.hook_point.name}, {self.where}", *options])


def chosen(where: Where, schedule: Schedule | None, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
    """Which of a pass's tokens are in a set and have a factor other than 0."""
    mask = where.resolve(rows)
    return mask if schedule is None else mask & (schedule.factor(rows.generated_index) != 0)


def edit_along(
    operator: Operator,
    vector: SteeringVector,
    where: WhereLike,
    norm: Norm | None,
    schedule: Schedule | None,
    when: When | None,
) -> Edit:
    """The edit that applies an operator along a vector, at the default positions if none are given.

    Raises:
        PlanError: for something else than a vector, positions or options of an edit.
    """
    if not isinstance(vector, SteeringVector):
        raise PlanError(
            f"An edit takes a SteeringVector, got {type(vector).__name__}; "
            "wrap a tensor with SteeringVector.from_tensor(tensor, layer=…), or choose a layer of a VectorSet."
        )
    return Edit(operator, vector, as_where(where, default()), norm=norm, schedule=schedule, when=when)


def norm_kept(h: Tensor, change: Tensor) -> Tensor:
    """The change that gives h + change the norm of h; where nothing is left, there is nothing to rescale."""
    edited = h + change
    before = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    after = torch.linalg.vector_norm(edited, dim=-1, keepdim=True)
    return edited * torch.where(after > 0, before / after, 1.0) - h
