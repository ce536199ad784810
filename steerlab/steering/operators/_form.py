"""The form that operators share: Δ(h) = Σ g(r·h + b)·w.

Each term reads the stream along one direction r, and writes along another, w, what a gate g makes of the reading. All
terms of an operator read the same h. Every engine evaluates this one form, so an operator that states its terms runs on
all of them.

    operator                    terms: r, w, g(z)
    add                         −, u, a
    ablate                      u, u, −z
    clamp                       u, u, clip(z, lo, hi) − z
    set                         u, u, c − z
    rotate                      four: each of the plane's axes read, each written, a multiple of z
    loreft                      one for each row of R: (W − R)_i, R_i, z + b_i
    a feature set to c          e, d, c − z where z > θ
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._numbers import as_number, shown
from steerlab.core.errors import PlanError


@dataclass(frozen=True)
class Gate:
    """A piecewise linear function: g(z) = amount + gain·clip(z, lo, hi) + slope·z where z > threshold, else 0.

    Raises:
        PlanError: for what is no number, or for lo > hi. Only lo, hi and threshold may be infinite.
    """

    amount: float = 0.0
    gain: float = 0.0
    lo: float = -math.inf
    hi: float = math.inf
    slope: float = 0.0
    threshold: float = -math.inf

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            number = as_number(getattr(self, name), infinite=name in ("lo", "hi", "threshold"))
            if number is None:
                raise PlanError(f"{name} of a gate is a number, got {shown(getattr(self, name))}.")
            object.__setattr__(self, name, number)
        if not self.lo <= self.hi:
            raise PlanError(f"A gate needs lo ≤ hi, got lo={self.lo!r} and hi={self.hi!r}.")

    @property
    def is_constant(self) -> bool:
        """Whether it is `amount` whatever z is."""
        return self.gain == 0 and self.slope == 0 and self.threshold == -math.inf

    def __call__(self, z: Tensor) -> Tensor:
        value = self.amount + self.slope * z
        if self.gain != 0:
            value = value + self.gain * z.clamp(self.lo, self.hi)
        return value if self.threshold == -math.inf else torch.where(z > self.threshold, value, 0.0)


@dataclass(frozen=True, eq=False)
class Term:
    """One summand g(r·h + b)·w of Δ(h).

    Attributes:
        write: w, float32 [d_model]; converted from any other floating-point tensor or array.
        gate: g.
        read: r, likewise; None for a constant gate, which reads nothing.
        bias: b.

    Raises:
        PlanError: for directions or a bias that are not numbers, or a gate that needs a direction to read along.
    """

    write: Float[Tensor, " d_model"]
    gate: Gate
    read: Float[Tensor, " d_model"] | None = None
    bias: float = 0.0

    def __post_init__(self) -> None:
        for name in ("write", "read"):
            object.__setattr__(self, name, _direction(getattr(self, name), name))
        bias = as_number(self.bias)
        if bias is None:
            raise PlanError(f"The bias of a term is a finite number, got {shown(self.bias)}.")
        object.__setattr__(self, "bias", bias)
        if self.read is None and not self.gate.is_constant:
            raise PlanError(f"A term with the gate {self.gate} reads the stream; give it a direction to read along.")

    def __call__(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "..."]:
        """Its part of Δ(h); [d_model] if it is the same for every h."""
        if self.read is None or self.gate.is_constant:
            return self.gate.amount * self.write
        return self.gate(h @ self.read + self.bias)[..., None] * self.write


def _direction(values: Any, name: str) -> Tensor | None:
    """A direction in float32, which all engines compute in; None for None, where that may be."""
    if values is None and name == "read":
        return None
    if not isinstance(values, Tensor | np.ndarray):
        raise PlanError(f"A term's {name} is a tensor along the stream, got {shown(values)}.")
    return torch.as_tensor(values).float()


def change(terms: Sequence[Term], h: Float[Tensor, "*batch d_model"]) -> Any:
    """Δ(h), float32; [d_model] if it is the same for every h."""
    total = terms[0](h)
    for term in terms[1:]:
        total = total + term(h)
    return total


def check_terms(terms: Any, name: str, d_model: int) -> tuple[Term, ...]:
    """What an operator states as its terms, if it is some, along directions of the stream's width.

    Raises:
        PlanError: otherwise.
    """
    found = tuple(terms) if isinstance(terms, list | tuple) else ()
    if not found or not all(isinstance(term, Term) for term in found):
        raise PlanError(f"terms of the operator {name} gives one or more Terms in a tuple, got {shown(terms)}.")
    for term in found:
        for direction in (term.read, term.write):
            if direction is not None and tuple(direction.shape) != (d_model,):
                raise PlanError(
                    f"A term of the operator {name} is along a tensor of shape {list(direction.shape)}; the stream has "
                    f"[{d_model}]."
                )
    return found
