"""One edit of a plan: an operator along a vector, at positions, with a scale."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from steerlab.core.errors import PlanError
from steerlab.core.hook_points import HookPoint
from steerlab.steering.operator import Direction, Operator
from steerlab.steering.vectors import SteeringVector
from steerlab.steering.where import Where


@dataclass(frozen=True)
class Edit:
    """An operator along a vector, at positions.

    Attributes:
        operator: the map h → Δ(h).
        vector: the direction, with its hook point.
        where: the positions.
        scale: multiplies Δ.
        median_norm: of the stream at the hook point, once known.
    """

    operator: Operator
    vector: SteeringVector
    where: Where
    scale: float = 1.0
    median_norm: float | None = None
    _directions: dict[torch.device, Direction] = field(default_factory=dict, repr=False, compare=False, init=False)
    _constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor] | None] = field(
        default_factory=dict, repr=False, compare=False, init=False
    )

    def __post_init__(self) -> None:
        vector = self.vector
        card_applies = vector.card.extracted_at == vector.hook_point.name
        if self.median_norm is None and self.needs_median_norm and card_applies:
            object.__setattr__(self, "median_norm", vector.card.median_norm)
        if not _is_number(self.scale):
            raise PlanError(f"The scale of an edit is a finite number, got {self.scale!r}.")
        if self.median_norm is not None and not (_is_number(self.median_norm) and self.median_norm > 0):
            raise PlanError(f"The median norm at {vector.hook_point.name} is a number > 0, got {self.median_norm!r}.")

    @property
    def hook_point(self) -> HookPoint:
        """Where in the model it acts."""
        return self.vector.hook_point

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

    def delta(self, h: Tensor) -> Tensor:
        """Scaled Δ(h), float32, for a float32 stream of shape [..., d_model]."""
        return self.scale * self.operator.delta(h, self._direction(h.device))

    def constant_delta(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Scaled Δ [d_model] in a dtype, and its norm, if the operator's Δ does not depend on the stream."""
        key = (device, dtype)
        if key not in self._constants:
            constant = self.operator.constant(self._direction(device))
            with torch.inference_mode(False):
                scaled = None if constant is None else self.scale * constant
                self._constants[key] = None if scaled is None else (scaled.to(dtype), scaled.norm())
        return self._constants[key]

    def formula(self) -> tuple[float, float, float, float, float]:
        """(a, g, lo, hi, s): the operator's formula and the edit's scale; see `Operator.formula`."""
        return (*self.operator.formula(self._direction(torch.device("cpu"))), self.scale)

    def _direction(self, device: torch.device) -> Direction:
        """The vector on a device, copied there once."""
        if device not in self._directions:
            if self.needs_median_norm and self.median_norm is None:
                raise PlanError(f"{self} gives a dose, but the median norm there is unknown; resolve the plan first.")
            norm = math.nan if self.median_norm is None else self.median_norm
            with torch.inference_mode(False):
                values, unit = self.vector.values.to(device), self.vector.unit.to(device)
            self._directions[device] = Direction(values, unit, norm)
        return self._directions[device]

    def content(self) -> list[Any]:
        """What identifies the edit: operator, vector, positions, scale, and the norm its dose refers to."""
        return [self.operator.to_json(), self.vector.hash, self.where.to_json(), self.scale, self.median_norm]

    def __str__(self) -> str:
        times = "" if self.scale == 1 else f" × {self.scale:g}"
        return f"{self.operator}{times} at {self.hook_point.name}, {self.where}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
