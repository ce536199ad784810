"""The sampling policy: the distribution that the next token is sampled from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steerlab.core._arguments import explains_fields
from steerlab.core._numbers import as_integer, as_number, shown
from steerlab.core.errors import PolicyError


@explains_fields
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
        self._take("temperature", as_number, lambda value: value >= 0, "≥ 0")
        # logits / temperature must fit float32
        coldest = "at least 1e-6, or 0 for greedy"
        self._take("temperature", as_number, lambda value: value == 0 or value >= 1e-6, coldest)
        self._take("top_p", as_number, lambda value: 0 < value <= 1, "in (0, 1]")
        self._take("top_k", as_integer, lambda value: value >= 0, "an integer ≥ 0 (0 keeps all)")
        self._take("min_p", as_number, lambda value: 0 <= value <= 1, "in [0, 1]")
        self._take("repetition_penalty", as_number, lambda value: value > 0, "> 0 (1 is off)")

    def _take(self, name: str, read: Callable[[Any], Any], fits: Callable[[Any], bool], wanted: str) -> None:
        value = getattr(self, name)
        found = read(value)
        if found is None or not fits(found):
            raise PolicyError(f"{name} must be {wanted}, got {shown(value)}.")
        object.__setattr__(self, name, found)

    @classmethod
    def check(cls, given: Any) -> "SamplingPolicy":
        """The policy itself, checked.

        Raises:
            PolicyError: otherwise.
        """
        if not isinstance(given, cls):
            raise PolicyError(f"policy takes a SamplingPolicy, got {shown(given)}.")
        return given

    @property
    def is_greedy(self) -> bool:
        """Whether the policy is a point mass on the highest logit."""
        return self.temperature == 0

    @classmethod
    def greedy(cls) -> "SamplingPolicy":
        """The policy that always takes the most probable token."""
        return cls(temperature=0.0)
