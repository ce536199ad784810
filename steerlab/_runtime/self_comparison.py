"""What comparisons of a model with itself share: how the model rounds, and which tokens it is given."""

from typing import Any

import torch

from steerlab.measures._rounding import Rounding


def rounding_of(model: Any) -> Rounding:
    """How a causal language model rounds: the coarsest dtype of its weights, and its number of layers."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1}
    coarsest = max(dtypes or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)
    return Rounding(coarsest, getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1)


def ordinary_tokens(model: Any, count: int) -> list[int]:
    """Token ids from all over the vocabulary.

    The first ones are special tokens, or bytes: a trained model makes of them what no text leads to, and multiplies
    roundings until, in bfloat16, its logits have little to do with those of another attention kernel.
    """
    d_vocab = model.get_input_embeddings().weight.shape[0]
    return [(k + 1) * d_vocab // (count + 1) for k in range(count)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of a device, of the processor, or of a library on a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _MEMORY_RAN_OUT)


_MEMORY_RAN_OUT = ("out of memory", "can't allocate memory", "alloc_failed")
