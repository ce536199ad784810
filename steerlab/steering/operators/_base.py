"""The base class of operators: maps h → h + Δ(h) along one direction."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core.errors import PlanError
from steerlab.steering.operators._form import Gate, Term, change, check_terms

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
    _kept: dict[int, tuple["Operator", tuple[Term, ...]]] = field(default_factory=dict, repr=False, compare=False)

    def terms_of(self, operator: "Operator") -> tuple[Term, ...]:
        """The terms of an operator along these vectors, made once.

        Raises:
            PlanError: if it has none, or states something else.
        """
        known = self._kept.get(id(operator))
        if known is None:
            with torch.inference_mode(False):  # a gradient may pass through them later
                found = check_terms(operator.terms(self), type(operator).__name__, len(self.unit))
            known = self._kept[id(operator)] = (operator, found)
        return known[1]


class Operator(ABC):
    """A map h → Δ(h) along one direction.

    An operator states `unit`, `to_json`, and what it does: its `terms`, if Δ is of the form that all engines share,
    else `delta`, which the vLLM engine cannot run. The rest has a default that an operator may replace: it reads as its
    `str` times a scale (`told`), needs no vector but the edit's (`others`), and acts along any vector (`check`).

    Attributes:
        unit: `dose` if its numbers are in median norms of the stream, else `coef`.
    """

    unit: Unit

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description with a text `kind`, read back by `operator_from_json`.

        It is what identifies the operator: two that do different things describe themselves differently.
        """

    def terms(self, along: Direction) -> tuple[Term, ...]:
        """The summands g(r·h + b)·w of Δ(h), on the device of `along`.

        Raises:
            PlanError: if the operator is not of that form (`has_formula`).
        """
        if type(self).formula is Operator.formula:
            raise PlanError(f"{self} states no terms, so it is not of the form that engines share.")
        amount, gain, lo, hi = self.formula(along)
        if gain == 0:
            return (Term(along.unit, Gate(amount)),)
        return (Term(along.unit, Gate(amount, gain, lo, hi, -gain), along.unit),)

    def formula(self, along: Direction) -> tuple[float, float, float, float]:
        """(a, g, lo, hi) in place of `terms`, for Δ(h) = [a + g·(clip(u·h, lo, hi) − u·h)]·u."""
        return (0.0, 0.0, -math.inf, math.inf)

    @property
    def has_formula(self) -> bool:
        """Whether the operator is of the form that engines share."""
        return type(self).terms is not Operator.terms or type(self).formula is not Operator.formula

    def delta(self, h: Float[Tensor, "*batch d_model"], along: Direction) -> Float[Tensor, "*batch d_model"]:
        """Δ(h) in float32; may be smaller than h if it broadcasts to its shape."""
        return change(along.terms_of(self), h).expand_as(h)

    def constant(self, along: Direction) -> Float[Tensor, " d_model"] | None:
        """Δ if it is the same for every h, else None."""
        if not self.has_formula or type(self).delta is not Operator.delta:
            return None
        terms = along.terms_of(self)
        return change(terms, along.unit) if all(term.gate.is_constant for term in terms) else None

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
