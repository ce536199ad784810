"""Divergence between two next-token distributions."""

import math

import torch
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


def normalised_kl(
    log_p: Float[Tensor, "*batch d_vocab"], log_q: Float[Tensor, "*batch d_vocab"]
) -> Float[Tensor, "*batch"]:
    """`kl` of log-distributions that sum to 1 already, at a third of its cost."""
    p = log_p.exp()
    return (p * (log_p - log_q)).masked_fill_(p == 0, 0.0).sum(dim=-1).clamp_min(0.0)


def jensen_shannon(
    log_a: Float[Tensor, "*batch d_vocab"], log_b: Float[Tensor, "*batch d_vocab"]
) -> Float[Tensor, "*batch"]:
    """Jensen-Shannon divergence of two log-distributions, in nats, per row; between 0 and ln 2.

    Examples:
        >>> a, b = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.0, 0.0, 1.0]).log()
        >>> round(jensen_shannon(a, b).item(), 4)  # nothing in common: ln 2
        0.6931
    """
    middle = torch.logaddexp(log_a, log_b) - math.log(2)
    return (normalised_kl(log_a, middle) + normalised_kl(log_b, middle)) / 2
