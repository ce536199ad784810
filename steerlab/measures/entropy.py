"""Entropy of the next-token distribution."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core.policy import SamplingPolicy
from steerlab.measures.nucleus import nucleus, widen


def entropy(logits: Float[Tensor, "*batch d_vocab"], *, dtype: torch.dtype | None = None) -> Float[Tensor, "*batch"]:
    """Entropy of softmax(logits), in nats."""
    return rb_entropy(logits, SamplingPolicy(), dtype=dtype)


def rb_entropy(
    logits: Float[Tensor, "*batch d_vocab"], policy: SamplingPolicy, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*batch"]:
    """Entropy of the sampling distribution at each step, in nats: the Rao-Blackwellised term of sequence entropy.

    H = logsumexp_S(a) − Σ_S q·a with a = logits / temperature shifted by its maximum, S the nucleus and q the softmax
    of a over S. Summed over the steps of sampled sequences it estimates the entropy of the policy without bias and with
    less variance than −log q of the tokens drawn.

    Args:
        logits: raw logits, after any repetition penalty.
        policy: the sampling policy; temperature 0 is a point mass with entropy 0.
        dtype: of the computation on the set; None means float32, or the input's own if wider.

    Returns:
        One entropy per row of logits.

    Examples:
        >>> p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
        >>> round(rb_entropy(p.log(), SamplingPolicy(temperature=0.7)).item(), 4)
        0.9903
    """
    scale = 1.0 if policy.is_greedy else policy.temperature
    inside = nucleus(logits, policy)
    wide = widen(logits, dtype)
    # shifted before the division, so that large logits lose nothing; the highest one is always inside
    shifted = ((wide - wide.amax(dim=-1, keepdim=True).detach()) / scale).masked_fill(~inside, -math.inf)
    q = shifted.softmax(dim=-1)
    weighted = (q * shifted.masked_fill(~inside, 0.0)).sum(dim=-1)
    return (shifted.logsumexp(dim=-1) - weighted).clamp_min(0.0)
