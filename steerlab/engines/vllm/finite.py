"""Which rows of logits are not finite: their stream left the range of its numbers; nothing may be drawn from them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def count_failed(logits: Float[Tensor, "rows d_vocab"]) -> Int[Tensor, " rows"]:
    """1 for a row that holds NaN or +inf, else 0; left on the device.

    A stream that is not finite makes every logit NaN; half-precision logits may also overflow by themselves. A
    token that is masked out has −inf, which is meant.
    """
    return (~(logits.amax(dim=-1) < torch.inf)).int()
