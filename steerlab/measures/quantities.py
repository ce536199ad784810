"""Quantities of a next-token prediction that can be serialised by name, and so computed in a worker process.

Each is a frozen dataclass that is called with logits [rows, d_vocab] and token ids [rows]. The TransformerLens engine's
`measure` takes them because they are functions; the vLLM engine takes them because its workers can be told them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor

from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.measures.entropy import rb_entropy
from steerlab.measures.log_probs import chosen_log_probs, log_q
from steerlab.measures.nucleus import widen


@dataclass(frozen=True)
class TokenLogProb:
    """Log-probability of each row's token under the model's softmax, in nats, in float32 or wider.

    Examples:
        >>> import torch
        >>> TokenLogProb()(torch.zeros(1, 4), torch.tensor([2]))
        tensor([-1.3863])
    """

    def __call__(self, logits: Float[Tensor, "rows d_vocab"], tokens: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """One log-probability per row."""
        return chosen_log_probs(logits, tokens)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`."""
        return {"kind": "token_log_prob"}


@dataclass(frozen=True)
class PolicyEntropy:
    """Entropy of the sampling distribution at each row, in nats; see `steerlab.measures.rb_entropy`.

    Attributes:
        policy: the sampling policy, without repetition penalty, which depends on the tokens so far.
    """

    policy: SamplingPolicy

    def __post_init__(self) -> None:
        _check_memoryless(self)

    def __call__(self, logits: Float[Tensor, "rows d_vocab"], tokens: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """One entropy per row; the tokens do not matter."""
        return rb_entropy(logits, self.policy)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`."""
        return {"kind": "policy_entropy", "policy": asdict(self.policy)}


@dataclass(frozen=True)
class PolicyLogQ:
    """Log-probability of each row's token under a sampling policy, in nats; −inf outside its nucleus.

    Attributes:
        policy: the sampling policy, without repetition penalty, which depends on the tokens so far.
    """

    policy: SamplingPolicy

    def __post_init__(self) -> None:
        _check_memoryless(self)

    def __call__(self, logits: Float[Tensor, "rows d_vocab"], tokens: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """One log q per row."""
        return log_q(logits, tokens, self.policy)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`."""
        return {"kind": "policy_log_q", "policy": asdict(self.policy)}


@dataclass(frozen=True)
class LogDistribution:
    """The whole log-softmax of each row, float32: the only quantity with a value per token of the vocabulary.

    It takes 4·d_vocab bytes a row: half a megabyte at 128 thousand tokens.
    """

    def __call__(
        self, logits: Float[Tensor, "rows d_vocab"], tokens: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows d_vocab"]:
        """One log-distribution per row; the tokens do not matter."""
        return widen(logits).log_softmax(dim=-1).float()

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`."""
        return {"kind": "log_distribution"}


Quantity: TypeAlias = TokenLogProb | PolicyEntropy | PolicyLogQ | LogDistribution
"""What can be measured anywhere, also in another process."""

_PLAIN: dict[str, type[TokenLogProb] | type[LogDistribution]] = {
    "token_log_prob": TokenLogProb,
    "log_distribution": LogDistribution,
}
_UNDER_POLICY: dict[str, type[PolicyEntropy] | type[PolicyLogQ]] = {
    "policy_entropy": PolicyEntropy,
    "policy_log_q": PolicyLogQ,
}


def check_named(measures: Any) -> None:
    """Checks that the measures are functions by name.

    Raises:
        InputError: otherwise, or if there are none.
    """
    named = isinstance(measures, Mapping) and len(measures) > 0 and all(map(callable, measures.values()))
    if not named:
        raise InputError(f"measures is a dictionary of names and functions, with at least one, got {measures!r:.80}.")


def from_json(data: Any) -> Quantity:
    """The quantity whose `to_json` wrote this.

    Raises:
        InputError: if none did.

    Examples:
        >>> from_json({"kind": "token_log_prob"})
        TokenLogProb()
    """
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if kind in _PLAIN and data.keys() == {"kind"}:
        return _PLAIN[kind]()
    if kind in _UNDER_POLICY and data.keys() == {"kind", "policy"} and isinstance(data["policy"], Mapping):
        return _UNDER_POLICY[kind](_policy(data["policy"]))
    raise InputError(f"{data!r:.200} is no quantity; its kind is one of {', '.join([*_PLAIN, *_UNDER_POLICY])}.")


def _policy(fields: Mapping[str, Any]) -> SamplingPolicy:
    known = asdict(SamplingPolicy())
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise InputError(f"A sampling policy has no {unknown[0]!r}; it has {', '.join(known)}.")
    return SamplingPolicy(**fields)


def _check_memoryless(quantity: PolicyEntropy | PolicyLogQ) -> None:
    """A quantity of one prediction alone cannot know which tokens came before."""
    if quantity.policy.repetition_penalty != 1:
        raise PolicyError(
            f"{type(quantity).__name__} sees one prediction at a time, and a repetition penalty "
            f"({quantity.policy.repetition_penalty}) depends on all tokens before it; use a policy without one."
        )
