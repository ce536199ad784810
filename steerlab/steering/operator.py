"""What an operator is: a map h → h + Δ(h) along one direction."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

Unit: TypeAlias = Literal["dose", "coef"]


@dataclass(frozen=True)
class Direction:
    """What an operator needs of a vector, on one device.

    Attributes:
        values: the vector, float32 [d_model].
        unit: the same with norm 1.
        median_norm: median norm of the stream at the hook point; NaN if no dose is involved.
    """

    values: Tensor
    unit: Tensor
    median_norm: float


class Operator:
    """A map h → Δ(h) along one direction."""

    unit: Unit

    @abstractmethod
    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        """Δ(h) in float32; may be smaller than h if it broadcasts to its shape."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `operator_from_json`."""

    @abstractmethod
    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        """(a, g, lo, hi) such that Δ(h) = [a + g·(clip(u·h, lo, hi) − u·h)]·u, for engines that share one formula."""

    def constant(self, along: Direction) -> Float[Tensor, " d_model"] | None:
        """Δ if it is the same for every h, else None."""
        return None
