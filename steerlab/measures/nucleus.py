"""The nucleus: which tokens a sampling policy can draw, and with which probabilities."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab.core.policy import SamplingPolicy


def widen(logits: Float[Tensor, "*batch d_vocab"], dtype: torch.dtype | None = None) -> Float[Tensor, "*batch d_vocab"]:
    """Logits in `dtype`, by default their own if it is float32 or float64, else float32."""
    if dtype is None:
        dtype = logits.dtype if logits.dtype in (torch.float32, torch.float64) else torch.float32
    return logits.to(dtype)


def nucleus(logits: Float[Tensor, "*batch d_vocab"], policy: SamplingPolicy) -> Bool[Tensor, "*batch d_vocab"]:
    """Which tokens survive temperature, top_k, top_p and min_p, in that order.

    top_k keeps the k highest logits. top_p then sorts ascending and drops tokens while their cumulative mass (of what
    top_k left, renormalised) is at most 1 − top_p, so that the token on the boundary stays. min_p drops tokens less
    probable than min_p times the most probable. Ties keep the lower id, at least one token survives, and a temperature
    of 0 keeps the argmax alone. The set is chosen in float32, as a sampler does, whatever the input's dtype.

    The repetition penalty needs the tokens so far and comes before: see `apply_repetition_penalty`.

    Args:
        logits: raw logits.
        policy: the sampling policy.

    Returns:
        True for tokens in the nucleus; same shape as `logits`.

    Source:
        Holtzman et al. 2020 (arXiv:1904.09751) for top_p; the boundary rule is that of Hugging Face's warpers.

    Examples:
        >>> p = torch.tensor([0.3, 0.1, 0.1, 0.5])
        >>> nucleus(p.log(), SamplingPolicy(top_p=0.8))
        tensor([ True, False, False,  True])
    """
    raw = logits.detach().to(torch.float32)
    if policy.is_greedy:
        best = raw.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(raw, dtype=torch.bool).scatter_(-1, best, True)
    scaled = raw / policy.temperature
    if policy.top_k == 0 and policy.top_p >= 1 and policy.min_p == 0:
        return scaled > -math.inf
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    keep = ordered > -math.inf
    if policy.top_k:
        keep[..., policy.top_k :] = False
    if policy.top_p < 1:
        keep &= _within_top_p(ordered.masked_fill(~keep, -math.inf), policy.top_p)
    if policy.min_p > 0:
        mass = ordered.masked_fill(~keep, -math.inf).softmax(dim=-1)
        keep &= mass >= policy.min_p * mass[..., :1]
    keep[..., 0] = True
    return torch.zeros_like(keep).scatter_(-1, ids, keep)


def _within_top_p(ordered: Float[Tensor, "*batch d_vocab"], top_p: float) -> Bool[Tensor, "*batch d_vocab"]:
    """Which of the descending logits stay when the low end is dropped up to a mass of 1 − top_p."""
    from_below = ordered.softmax(dim=-1).flip(-1).cumsum(dim=-1)
    return (from_below > 1 - top_p).flip(-1)


def policy_log_probs(
    logits: Float[Tensor, "*batch d_vocab"], policy: SamplingPolicy, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*batch d_vocab"]:
    """Log q of every token: the log-softmax of logits / temperature over the nucleus, −inf outside it.

    Args:
        logits: raw logits, after any repetition penalty.
        policy: the sampling policy.
        dtype: of the computation on the set; None means float32, or the input's own if wider.

    Returns:
        Log-probabilities in nats, same shape as `logits`.
    """
    inside = nucleus(logits, policy)
    scale = 1.0 if policy.is_greedy else policy.temperature
    scaled = (widen(logits, dtype) / scale).masked_fill(~inside, -math.inf)
    return scaled.log_softmax(dim=-1)


def apply_repetition_penalty(
    logits: Float[Tensor, "batch d_vocab"], seen: Bool[Tensor, "batch d_vocab"], policy: SamplingPolicy
) -> Float[Tensor, "batch d_vocab"]:
    """Logits with those of tokens already seen divided (if positive) or multiplied (if negative) by the penalty.

    Source:
        Keskar et al. 2019 (arXiv:1909.05858), section 4.1, in Hugging Face's form for negative logits.
    """
    if policy.repetition_penalty == 1:
        return logits
    penalised = torch.where(logits > 0, logits / policy.repetition_penalty, logits * policy.repetition_penalty)
    return torch.where(seen, penalised, logits)


def sample_by_inverse_cdf(
    log_q: Float[Tensor, "batch d_vocab"], uniforms: Float[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """The token whose cumulative interval, in order of ids, holds each uniform draw in [0, 1).

    A token of probability 0 is never drawn. Sums are in float64, so that the draw depends on the row alone.
    """
    cdf = log_q.to(torch.float64).exp().cumsum(dim=-1)
    points = (uniforms.to(torch.float64) * cdf[:, -1])[:, None]
    drawn = torch.searchsorted(cdf, points, right=True)
    last = log_q.shape[-1] - 1 - (log_q > -math.inf).flip(-1).to(torch.int8).argmax(dim=-1, keepdim=True)
    return torch.minimum(drawn, last).squeeze(-1)
