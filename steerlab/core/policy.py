"""The sampling policy: which distribution over the next token is really sampled."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from steerlab.core.errors import PolicyError


@dataclass(frozen=True)
class SamplingPolicy:
    """How the next token is drawn from the logits; every value is explicit, nothing is taken from a checkpoint.

    The steps apply in this order: repetition penalty, temperature, top_k, top_p, min_p. What survives them is the
    nucleus, the set S on which the sampling distribution q is the softmax of logits / temperature.
    `steerlab.measures.nucleus` is the one function that computes it.

    Attributes:
        temperature: divides the logits; 0 is greedy, a point mass on the highest logit (the lowest id on ties).
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p, the boundary token included; 1
            keeps all.
        top_k: keep the k highest logits (the lower id on ties); 0 keeps all.
        min_p: drop tokens less probable than min_p times the most probable one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the sequence; 1 is off.

    Raises:
        PolicyError: for a value outside its range.

    Examples:
        >>> SamplingPolicy(temperature=0.7, top_p=0.9).is_greedy
        False
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(_is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "≥ 0")
        fits = self.temperature == 0 or self.temperature >= 1e-6  # logits / temperature must fit float32
        _require(fits, "temperature", self.temperature, "at least 1e-6, or 0 for greedy")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(_is_integer(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer ≥ 0 (0 keeps all)")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _require(_is_number(penalty) and penalty > 0, "repetition_penalty", penalty, "> 0 (1 is off)")

    @property
    def is_greedy(self) -> bool:
        """Whether the policy is a point mass on the highest logit."""
        return self.temperature == 0

    @classmethod
    def greedy(cls) -> "SamplingPolicy":
        """The policy that always takes the most probable token."""
        return cls(temperature=0.0)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise PolicyError(f"{name} must be {wanted}, got {value!r}.")
