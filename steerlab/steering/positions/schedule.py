"""Schedules: how an edit's strength changes over the generated positions.

A schedule is a factor on Δ as a function of j, the 0-based index of a generated token (as in `where.generated`). Prompt
positions take the factor of j = 0. Where the factor is 0 the position counts as not edited.

Source:
    Scalena et al. 2024, Multi-property Steering of Large Language Models with Dynamic Activation Composition
    (arXiv:2406.17563), compares fixed, starting, fading and dynamic strengths over generation.

Examples:
    >>> str(linear(1.0, 0.0, over=10))
    'linear(1, 0, over=10)'
"""

import math
from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from steerlab.core._numbers import Integer, Number, check_integer, plain
from steerlab.core.errors import PlanError
from steerlab.steering._strengths import finite


class Curve(NamedTuple):
    """The factor wherever a schedule acts: [start + (end − start)·min(j / over, 1)] · 0.5^(j / half_life)."""

    start: float = 1.0
    end: float = 1.0
    over: float = 1.0
    half_life: float = math.inf


class Schedule(ABC):
    """A factor on Δ over generated positions. Build it with this module's functions."""

    kind: ClassVar[str]

    @property
    def curve(self) -> Curve:
        """What every engine computes the factor from."""
        return Curve()

    def factor(self, index: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos"]:
        """The factor at each generated index; negative indices (the prompt) count as 0."""
        j, curve = index.clamp_min(0).to(torch.float32), self.curve
        share = (j / curve.over).clamp_max(1.0)
        value = (curve.start * (1 - share) + curve.end * share) * torch.exp2(-j / curve.half_life)
        return torch.where(self._acts(j), value, 0.0)

    @property
    def peak(self) -> float:
        """The largest absolute factor."""
        return max(abs(self.curve.start), abs(self.curve.end))

    def _acts(self, index: Float[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """Where the factor may be other than 0."""
        return torch.ones_like(index, dtype=torch.bool)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`: the kind and the values."""
        return {"kind": self.kind} | vars(self)


@dataclass(frozen=True)
class Constant(Schedule):
    """The same factor everywhere."""

    kind = "constant"
    value: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", finite(self.value, "constant"))

    @property
    @override
    def curve(self) -> Curve:
        return Curve(self.value, self.value)

    def __str__(self) -> str:
        return f"constant({self.value:g})"


@dataclass(frozen=True)
class Linear(Schedule):
    """From `start` at j = 0 to `end` at j = `over`, and `end` from there on."""

    kind = "linear"
    start: float
    end: float
    over: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", finite(self.start, "start"))
        object.__setattr__(self, "end", finite(self.end, "end"))
        object.__setattr__(self, "over", check_integer(self.over, "over", least=1, error=PlanError))

    @property
    @override
    def curve(self) -> Curve:
        return Curve(self.start, self.end, self.over)

    def __str__(self) -> str:
        return f"linear({self.start:g}, {self.end:g}, over={self.over})"


@dataclass(frozen=True)
class Decay(Schedule):
    """0.5^(j / half_life)."""

    kind = "decay"
    half_life: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "half_life", finite(self.half_life, "half_life"))
        if self.half_life <= 0:
            raise PlanError(f"decay takes a half_life > 0, in tokens, got {self.half_life!r}.")

    @property
    @override
    def curve(self) -> Curve:
        return Curve(half_life=self.half_life)

    def __str__(self) -> str:
        return f"decay(half_life={self.half_life:g})"


@dataclass(frozen=True)
class Window(Schedule):
    """1 for after ≤ j < until, else 0."""

    kind = "window"
    after: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "after", check_integer(self.after, "after", least=0, error=PlanError))
        if self.until is not None:
            object.__setattr__(self, "until", check_integer(self.until, "until", least=1, error=PlanError))
            if self.until <= self.after:
                raise PlanError(f"window(after={self.after}, until={self.until}) is empty; until must exceed after.")

    @override
    def _acts(self, index: Float[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        inside = index >= self.after
        return inside if self.until is None else inside & (index < self.until)

    def __str__(self) -> str:
        return f"window(after={self.after}, until={self.until})"


def constant(value: Number = 1.0) -> Schedule:
    """The same factor everywhere."""
    return Constant(plain(value))


def linear(start: Number, end: Number, *, over: Integer) -> Schedule:
    """From `start` at j = 0 to `end` at j = `over` generated tokens, and `end` from there on."""
    return Linear(plain(start), plain(end), plain(over))


def decay(half_life: Number) -> Schedule:
    """Halves every `half_life` generated tokens, from 1 at j = 0."""
    return Decay(plain(half_life))


def window(after: Integer = 0, until: Integer | None = None) -> Schedule:
    """Full strength for after ≤ j < until, none outside; prompt positions follow j = 0."""
    return Window(plain(after), plain(until))


def from_json(data: dict[str, Any]) -> Schedule:
    """The schedule that `to_json` described.

    Raises:
        PlanError: if the description is not one of ours.
    """
    kinds = {found.kind: found for found in (Constant, Linear, Decay, Window)}
    try:
        kind = kinds[data["kind"]]
        return kind(**{key: value for key, value in data.items() if key != "kind"})
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"Not a description of a schedule: {data!r:.120}.") from error
