"""Raw logits of a model as a function of its parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steerlab._runtime.arguments import optional_arguments
from steerlab._runtime.evaluation import evaluating
from steerlab._runtime.model_parts import ModelParts
from steerlab.core.errors import InputError
from steerlab.sequences._overrides import Overrides
from steerlab.sequences._precision import autocasting
from steerlab.sequences._sharded_head import whole_logits
from steerlab.sequences.config import FunctionalPrecision


def functional_logits(
    parts: ModelParts,
    overrides: Overrides,
    precision: FunctionalPrecision,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Tensor:
    """See `SequenceProcessor.functional_logits`."""
    if input_ids.dim() != 2 or (attention_mask is not None and attention_mask.shape != input_ids.shape):
        mask = None if attention_mask is None else tuple(attention_mask.shape)
        raise InputError(
            f"input_ids and attention_mask have one shape [batch, pos], got {tuple(input_ids.shape)} and {mask}."
        )
    ids = input_ids.to(parts.device)
    options: dict[str, Any] = {"use_cache": False}
    if attention_mask is not None:
        mask = attention_mask.to(parts.device)
        options["attention_mask"] = mask
        if optional_arguments(parts.causal, "position_ids"):
            options["position_ids"] = (mask.cumsum(dim=-1) - 1).clamp_min(0)
    state = overrides.complete(params) | overrides.check_buffers(buffers)
    with evaluating(parts.root), autocasting(precision, parts.device), whole_logits(parts.head):
        logits = torch.func.functional_call(parts.root, state, (ids,), options).logits
    return logits if logits.dtype == torch.float64 else logits.float()
