"""The nucleus: which tokens a sampling policy can draw, and with which probabilities."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab._kernels.availability import runs_kernels
from steerlab.core.policy import SamplingPolicy
from steerlab.measures._top_p import MIN_VOCABULARY, rows_at_once, top_p_edges

LEAST_TAIL = 1e-5
"""With a smaller 1 − top_p, rounding of the total could decide on a GPU, and rows are sorted."""


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
    of 0 keeps the argmax alone. The set is chosen in float32, as a sampler does, whatever the input's dtype. Rows of
    2048 tokens or more on a GPU have their masses summed in float64, without sorting: where Hugging Face's running
    float32 sum comes within its own rounding (some 1e-6) of the bound, tokens at the very edge can differ from it.

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
    scaled = scaled_by(logits, policy)
    if not truncates(policy):
        return scaled > -math.inf
    return up_to_edge(scaled, _edges(scaled, policy))


def nucleus_edges(logits: Float[Tensor, "*batch d_vocab"], policy: SamplingPolicy) -> Int[Tensor, "*batch"] | None:
    """The last token of each nucleus, in the order "higher logit first, lower id first among equals".

    It holds the whole nucleus in one number per row: `up_to_edge` gives the set back.

    Args:
        logits: raw logits.
        policy: the sampling policy.

    Returns:
        Token ids; None for a policy that keeps every possible token.
    """
    return _edges(scaled_by(logits, policy), policy) if truncates(policy) else None


def up_to_edge(scaled: Float[Tensor, "*batch d_vocab"], edges: Int[Tensor, "*batch"]) -> Bool[Tensor, "*batch d_vocab"]:
    """The tokens with a higher logit than the edge, and those with an equal one and no higher id."""
    index = edges.unsqueeze(-1)
    cut = scaled.gather(-1, index)
    inside = scaled >= cut
    equal = scaled == cut
    if int(torch.count_nonzero(equal)) > edges.numel():
        ids = torch.arange(scaled.shape[-1], device=scaled.device)
        inside &= ~equal | (ids <= index)
    return inside


def truncates(policy: SamplingPolicy) -> bool:
    """Whether a policy can leave out tokens that the model thinks possible."""
    return policy.is_greedy or policy.top_k > 0 or policy.top_p < 1 or policy.min_p > 0


def scaled_by(logits: Float[Tensor, "*batch d_vocab"], policy: SamplingPolicy) -> Float[Tensor, "*batch d_vocab"]:
    """Logits / temperature in float32, on which every nucleus is chosen; a greedy policy leaves them as they are."""
    raw = logits.detach().to(torch.float32)
    return raw if policy.is_greedy or policy.temperature == 1 else raw / policy.temperature


def _edges(scaled: Tensor, policy: SamplingPolicy) -> Tensor:
    if policy.is_greedy:
        return scaled.argmax(dim=-1)
    only_top_p = policy.top_k == 0 and policy.min_p == 0
    if not only_top_p or scaled.shape[-1] < MIN_VOCABULARY:
        return _edges_by_sort(scaled, policy)
    rows = scaled.reshape(-1, scaled.shape[-1])
    if 1 - policy.top_p > LEAST_TAIL and runs_kernels(rows):
        from steerlab._kernels.top_p import top_p_edges_on_gpu

        return top_p_edges_on_gpu(rows, policy.top_p).reshape(scaled.shape[:-1])
    edges, sure = top_p_edges(rows, policy.top_p)
    for rest in (~sure).nonzero()[:, 0].split(rows_at_once(rows)):
        if len(rest):
            edges = edges.index_copy(0, rest, _edges_by_sort(rows[rest], policy))
    return edges.reshape(scaled.shape[:-1])


def _edges_by_sort(scaled: Tensor, policy: SamplingPolicy) -> Tensor:
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    keep = ordered > -math.inf
    if policy.top_k:
        keep[..., policy.top_k :] = False
    if policy.top_p < 1:
        keep &= _within_top_p(ordered.masked_fill(~keep, -math.inf), policy.top_p)
    if policy.min_p > 0:
        mass = ordered.masked_fill(~keep, -math.inf).softmax(dim=-1)
        keep &= mass >= policy.min_p * mass[..., :1]
    last = (keep.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    return ids.gather(-1, last).squeeze(-1)


def _within_top_p(ordered: Float[Tensor, "*batch d_vocab"], top_p: float) -> Bool[Tensor, "*batch d_vocab"]:
    """Which of the descending logits stay when the low end is dropped up to a mass of 1 − top_p."""
    from_below = ordered.flip(-1).softmax(dim=-1).cumsum(dim=-1)  # in the warpers' order, so that rounding is theirs
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
