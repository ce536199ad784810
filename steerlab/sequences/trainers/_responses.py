"""Batches of trainers, padded prompts and responses as tensors, as sequences and back."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steerlab.sequences.types import BatchedSequences


def as_sequences(
    prompt_ids: Int[Tensor, "rows prompt"],
    prompt_mask: Tensor,
    response_ids: Int[Tensor, "rows response"],
    response_mask: Tensor,
) -> BatchedSequences:
    """Rows as sequences with B = rows and G = 1; what the masks leave out is padding."""
    prompts = [ids[keep].tolist() for ids, keep in zip(prompt_ids.cpu(), prompt_mask.bool().cpu(), strict=True)]
    responses = [[ids[keep].tolist()] for ids, keep in zip(response_ids.cpu(), response_mask.bool().cpu(), strict=True)]
    return BatchedSequences.from_ids(prompts, responses)


def as_table(
    nested: Sequence[Sequence[Tensor]], response_mask: Tensor, fill: float = 0.0
) -> Float[Tensor, "rows response"]:
    """Numbers of every token in the places of `response_mask`, with their graph; `fill` elsewhere."""
    values = torch.cat([row[0] for row in nested])
    table = torch.full(response_mask.shape, fill, dtype=values.dtype, device=values.device)
    return table.masked_scatter(response_mask.bool().to(values.device), values)
