"""Attention of one new token per row to a masked cache, as a kernel that transformers knows by name.

Its own sdpa copies every key and value for each of the query heads that share it as soon as there is a mask, and a
cache of fixed size always has one; ours reads each once.
"""

from typing import Any

import torch
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


def decode_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """What transformers calls for a mask: sdpa's, made in fewer steps where it is causal, for one token per row."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if (
        q_length == 1
        and mask_function is causal_mask_function
        and not allow_is_causal_skip
        and attention_mask is not None
        and attention_mask.dtype == torch.bool
        and attention_mask.shape == (batch_size, kv_length)
    ):
        slots = torch.arange(kv_offset, kv_offset + kv_length, device=attention_mask.device)
        return (attention_mask & (slots <= q_offset))[:, None, None]
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,  # pyright: ignore[reportArgumentType]
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        **options,
    )


def register() -> str:
    """Makes the kernel known to transformers, with its masks.

    Returns:
        Its name there.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, decode_mask)
    return NAME
