"""Log-probabilities of given tokens, under the model and under a sampling policy."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab.core.policy import SamplingPolicy
from steerlab.measures.nucleus import nucleus, widen


def token_log_probs(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos-1"]:
    """Log-probability of each next token, in nats.

    Column t scores `tokens[:, t + 1]` given everything before it; the first token has no prediction, hence no column.
    """
    return chosen_log_probs(logits[:, :-1], tokens[:, 1:])


def chosen_log_probs(logits: Float[Tensor, "*batch d_vocab"], tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Log-probability in nats of one token per row of logits, computed in float32 or wider."""
    wide = widen(logits)
    chosen = wide.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - wide.logsumexp(dim=-1)


def log_q(
    logits: Float[Tensor, "*batch d_vocab"],
    tokens: Int[Tensor, "*batch"],
    policy: SamplingPolicy,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*batch"]:
    """Log-probability of one token per row under the sampling policy, in nats.

    log q(y) = a_y − logsumexp over the nucleus of a, with a = logits / temperature; −inf outside the nucleus.

    Args:
        logits: raw logits, after any repetition penalty.
        tokens: the token of each row.
        policy: the sampling policy.
        dtype: of the computation on the set; None means float32, or the input's own if wider.

    Examples:
        >>> p = torch.tensor([0.5, 0.3, 0.15, 0.05])
        >>> round(log_q(p.log(), torch.tensor(1), SamplingPolicy(temperature=0.7)).item(), 4)
        -1.2594
    """
    inside = nucleus(logits, policy)
    index = tokens.unsqueeze(-1)
    chosen_inside = inside.gather(-1, index).squeeze(-1)
    if policy.is_greedy:
        zero = torch.zeros_like(widen(logits, dtype)[..., 0])
        return zero.masked_fill(~chosen_inside, -math.inf)
    wide = widen(logits, dtype)
    # shifted before the division, so that large logits lose nothing
    scaled = (wide - wide.amax(dim=-1, keepdim=True).detach()) / policy.temperature
    normaliser = scaled.masked_fill(~inside, -math.inf).logsumexp(dim=-1)
    chosen = scaled.gather(-1, index).squeeze(-1) - normaliser
    return chosen.masked_fill(~chosen_inside, -math.inf)


def rows_not_finite(logits: Float[Tensor, "*rows d_vocab"]) -> Bool[Tensor, "*rows"]:
    """Which rows of logits hold NaN or +inf, or nothing but -inf; -inf for some tokens says that they cannot come."""
    largest = logits.amax(dim=-1)
    return (largest - largest).ne(0)  # inf − inf is NaN; `isfinite` takes four kernels, after every step on a GPU
