"""What comparisons of a model with itself share: how the model rounds, and which tokens it is given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from steerlab._runtime.autocast import without_autocast
from steerlab._runtime.evaluation import evaluating
from steerlab._runtime.model_state import remembered
from steerlab._runtime.modules import parameters_of
from steerlab.measures._rounding import Rounding

T = TypeVar("T")


def rounding_of(model: Any) -> Rounding:
    """How a causal language model rounds: the coarsest dtype of its weights, and its number of layers."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1}
    coarsest = max(dtypes or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)
    return Rounding(coarsest, getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1)


def found_out(model: Any, what: str, compare: Callable[[], T], *, weights: nn.Module | None = None) -> T:
    """What a comparison found on a model, made once for each dtype and kind of device that its weights are in.

    Args:
        model: what it is about.
        what: a name of the comparison.
        compare: makes it.
        weights: the module that holds the weights, where the model is none.
    """
    root = model if weights is None else weights
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters_of(root)}
    said = sorted({f"{dtype} on {device.type}" for dtype, device in kinds})
    return remembered(model, f"{what}, {', '.join(said)}", compare)


def ordinary_tokens(model: Any, count: int) -> list[int]:
    """Token ids from all over the vocabulary.

    The first ones are special tokens, or bytes: a trained model makes of them what no text leads to, and multiplies
    roundings until, in bfloat16, its logits have little to do with those of another attention kernel.
    """
    d_vocab = model.get_input_embeddings().weight.shape[0]
    return [(k + 1) * d_vocab // (count + 1) for k in range(count)]


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Runs the body without what a call may bring along and a comparison is not about: dropout, autocast, gradients."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    with evaluating(model), torch.no_grad(), without_autocast(*kinds):
        yield


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of a device, of the processor, or of a library on a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _MEMORY_RAN_OUT)


_MEMORY_RAN_OUT = ("out of memory", "can't allocate memory", "alloc_failed")
