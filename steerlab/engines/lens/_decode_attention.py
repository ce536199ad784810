"""Attention of one new token per row to a masked cache, as a kernel that transformers knows by name.

Its own sdpa copies every key and value for each of the query heads that share it as soon as there is a mask, and a
cache of fixed size always has one; ours reads each once.
"""

from typing import Any

from torch import Tensor

NAME = "steerlab_decode"


def decode_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls as an attention kernel: [rows, heads, 1, d_head] to [rows, 1, heads, d_head]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from steerlab._kernels.attention import attend, can_attend

    scale = options.get("scaling")
    if options.get("position_bias") is not None or not can_attend(query, key, value, attention_mask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return attend(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scale is None else scale), None


def register() -> str:
    """Makes the kernel known to transformers, with sdpa's masks.

    Returns:
        Its name there.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
