"""Three numbers per row of logits that determine a token's log-probability: maximum, sum of exponentials, own logit.

Ranks that share the vocabulary exchange these three and nothing else.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def row_sums(
    logits: Float[Tensor, "rows width"], tokens: Int[Tensor, " rows"], n_valid: int, offset: int
) -> Float[Tensor, "rows 3"]:
    """Per row the maximum m, Σ exp(x − m), and the logit of the row's token, over the first `n_valid` logits.

    Args:
        logits: float32; those from `n_valid` on are padding.
        tokens: one token per row.
        n_valid: how many logits are real.
        offset: the token that the first logit belongs to.

    Returns:
        m is −inf and the sum 0 where nothing is real or possible; the token's logit is 0 if it is not among these.
    """
    if logits.is_cuda:
        from steerlab.engines.vllm._worker.row_sums_triton import launch

        return launch(logits, tokens, n_valid, offset)
    local = tokens - offset
    owned = (local >= 0) & (local < n_valid)
    if not n_valid:
        return logits.new_tensor([-math.inf, 0.0, 0.0]).expand(len(logits), 3).contiguous()
    real = logits[:, :n_valid]
    top = real.amax(dim=-1)
    total = (real - _finite(top)[:, None]).exp_().sum(dim=-1)
    own = real.gather(-1, local.clamp(0, n_valid - 1)[:, None])[:, 0]
    return torch.stack([top, total, torch.where(owned, own, 0.0)], dim=-1)


def log_probs_of(sums: Float[Tensor, "ranks rows 3"]) -> Float[Tensor, " rows"]:
    """Log-probability of each row's token from the row sums of every part of the vocabulary, in nats.

    Examples:
        >>> parts = torch.tensor([[[0.0, 2.0, 0.0]], [[-math.inf, 0.0, 0.0]]])
        >>> round(log_probs_of(parts).item(), 4)
        -0.6931
    """
    tops, totals, own = sums.unbind(dim=-1)
    top = tops.amax(dim=0)
    total = (totals * (tops - _finite(top)).exp()).sum(dim=0)
    return (own.sum(dim=0) - _finite(top)) - total.log()


def _finite(top: Tensor) -> Tensor:
    """A shift that is a number even where every logit is −inf."""
    return top.masked_fill(top == -math.inf, 0.0)
