"""The base class of operators: maps h → h + Δ(h) along one direction."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

from steerlab.core.errors import PlanError

if TYPE_CHECKING:
    from steerlab.steering.vectors import SteeringVector

Unit: TypeAlias = Literal["dose", "coef"]


@dataclass(frozen=True)
class Direction:
    """The vectors of an edit, on one device.

    Attributes:
        values: the edit's vector, float32 [d_model].
        unit: the same with norm 1.
        median_norm: median norm of the stream at the hook point; NaN if no dose is involved.
        others: the operator's further vectors by name, float32 [d_model].
    """

    values: Tensor
    unit: Tensor
    median_norm: float
    others: Mapping[str, Tensor] = field(default_factory=dict)


class Operator(ABC):
    """A map h → Δ(h) along one direction.

    An operator states `unit`, `delta` and `to_json`. The rest has a default that an operator may replace: it has a
    `formula` unless `has_formula` is False, its Δ depends on the stream (`constant`), it reads as its `str` times a
    scale (`told`), needs no vector but the edit's (`others`), and acts along any vector (`check`).

    Attributes:
        unit: `dose` if its numbers are in median norms of the stream, else `coef`.
    """

    unit: Unit

    @abstractmethod
    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        """Δ(h) in float32; may be smaller than h if it broadcasts to its shape."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description with a text `kind`, read back by `operator_from_json`.

        It is what identifies the operator: two that do different things describe themselves differently.
        """

    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        """(a, g, lo, hi) such that Δ(h) = [a + g·(clip(u·h, lo, hi) − u·h)]·u, for engines that share one formula.

        Raises:
            PlanError: if the operator is not of that form (`has_formula`).
        """
        raise PlanError(f"{self} is not of the form that compiled engines share.")

    @property
    def has_formula(self) -> bool:
        """Whether the operator has a `formula`."""
        return True

    def constant(self, along: Direction) -> Float[Tensor, " d_model"] | None:
        """Δ if it is the same for every h, else None."""
        return None

    def told(self, scale: float) -> str:
        """The operator in words with its effective strength, where Δ is multiplied by `scale`."""
        return str(self) if scale == 1 else f"{self} × {scale:g}"

    @property
    def others(self) -> "Mapping[str, SteeringVector]":
        """Vectors it needs beside the edit's own."""
        return {}

    def check(self, vector: "SteeringVector") -> None:  # noqa: B027  most act along any vector
        """Checks that it can act along a vector.

        Raises:
            PlanError, VectorShapeError: if it cannot.
        """


def factor_of(unit: Unit, along: Direction) -> float:
    """The length of one unit of strength: 1 for `coef`, the median norm for `dose`."""
    return along.median_norm if unit == "dose" else 1.0
