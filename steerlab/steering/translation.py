"""The operator that adds a vector."""

import math
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from steerlab.steering.operator import Direction, Operator, Unit
from steerlab.steering.strengths import check_unit, finite


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

    @override
    def told(self, scale: float) -> str:
        return f"add({self.unit}={scale * self.amount:g})"

    def __str__(self) -> str:
        return self.told(1.0)
