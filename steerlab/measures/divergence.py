"""Divergence between two next-token distributions."""

import math

from jaxtyping import Float
from torch import Tensor

from steerlab.measures.nucleus import widen


def kl(logits_p: Float[Tensor, "*batch d_vocab"], logits_q: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch"]:
    """KL(p ‖ q) of the softmax distributions, in nats, per row; ≥ 0, infinite where q lacks a token that p has."""
    log_p = widen(logits_p).log_softmax(dim=-1)
    log_q = widen(logits_q).log_softmax(dim=-1)
    p = log_p.exp()
    terms = p * (log_p.masked_fill(p == 0, 0.0) - log_q.masked_fill((p == 0) & (log_q == -math.inf), 0.0))
    return terms.masked_fill(p == 0, 0.0).sum(dim=-1).clamp_min(0.0)
