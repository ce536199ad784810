"""A model's LM head on this rank: logits of chosen rows in float32, without gathering the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steerlab.core.errors import InputError

VOCABULARY_BLOCK = 8192
"""Rows of half-precision head weights that are widened at once where the hardware cannot accumulate for us."""


@dataclass(frozen=True)
class Head:
    """What turns final hidden states into this rank's share of the logits.

    Attributes:
        width: logits per row of this rank, padding included.
        n_valid: how many of them are real, always the first.
        offset: the token that the first one belongs to.
        d_vocab: logits of all ranks together.
        n_ranks: how many ranks share the vocabulary.
        fill: writes the logits of hidden states [rows, d_model] into a float32 buffer [rows, width].
        route: how, in a word.
    """

    width: int
    n_valid: int
    offset: int
    d_vocab: int
    n_ranks: int
    fill: Callable[[Tensor, Tensor], None]
    route: str

    def whole(self, logits: Float[Tensor, "rows width"]) -> Float[Tensor, "rows d_vocab"]:
        """Rows of logits of the whole vocabulary; under tensor parallelism every rank gets them."""
        if self.n_ranks == 1:
            return logits[:, : self.d_vocab]
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().all_gather(logits.contiguous(), dim=-1)[:, : self.d_vocab]


@dataclass(frozen=True)
class _Asked:
    """What a model hands to its LogitsProcessor."""

    processor: Any
    lm_head: Any
    bias: Tensor | None


def find_head(model: Any, d_model: int, dtype: torch.dtype, device: torch.device) -> Head:
    """The head of a model that has just been loaded.

    What the model's own `compute_logits` gives to vLLM's LogitsProcessor says which weights, scale and soft cap are
    its head. A model that does anything more with its logits is asked for them whole, in its own precision.

    Raises:
        InputError: if a model does not hand its logits to every rank.
    """
    probe = torch.zeros(1, d_model, dtype=dtype, device=device)
    with torch.inference_mode():
        asked = _ask(model, probe)
        if asked is not None and _is_plain(asked):
            return _sharded(asked, probe)
        logits = model.compute_logits(probe)
    if logits is None:
        raise InputError(f"{type(model).__name__} gives its logits to one rank only, so they cannot be scored.")
    width = logits.shape[-1]

    def fill(hidden: Tensor, out: Tensor) -> None:
        out.copy_(model.compute_logits(hidden))

    return Head(width, width, 0, width, 1, fill, "compute_logits")


def _ask(model: Any, probe: Tensor) -> _Asked | None:
    """What `compute_logits` passes to the model's one LogitsProcessor, if it returns just what that returns."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    seen: list[_Asked] = []
    answer = torch.empty(0)

    def listening(processor: Any) -> Callable[..., Tensor]:
        def forward(lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, **_: Any) -> Tensor:
            if hidden_states is probe and not processor.logits_as_input:
                seen.append(_Asked(processor, lm_head, embedding_bias))
            return answer

        return forward

    try:
        for processor in found:
            processor.forward = listening(processor)
        returned = model.compute_logits(probe)
    except (TypeError, RuntimeError, IndexError):  # it does more with its logits than an empty tensor allows
        return None
    finally:
        for processor in found:
            vars(processor).pop("forward", None)
    return seen[0] if len(seen) == 1 and returned is answer else None


def _is_plain(asked: _Asked) -> bool:
    """Whether the weights are vLLM's own kind of head, without further tokens of an adapter."""
    shard = getattr(asked.lm_head, "shard_indices", None)
    if not isinstance(asked.lm_head, nn.Module) or shard is None or not hasattr(asked.lm_head, "quant_method"):
        return False
    return shard.num_added_elements == 0 and type(asked.processor).forward.__module__.startswith("vllm.")


def _sharded(asked: _Asked, probe: Tensor) -> Head:
    processor, lm_head = asked.processor, asked.lm_head
    shard = lm_head.shard_indices
    offset, d_vocab = int(shard.org_vocab_start_index), int(processor.org_vocab_size)
    width = int(lm_head.num_embeddings_per_partition)
    project, route = _projection(lm_head, asked.bias, probe, width)

    def fill(hidden: Tensor, out: Tensor) -> None:
        project(hidden, out)
        if processor.soft_cap is not None:
            out.div_(processor.soft_cap).tanh_().mul_(processor.soft_cap)
        if processor.scale != 1.0:
            out.mul_(processor.scale)

    n_valid = max(0, min(int(shard.num_org_elements), d_vocab - offset))
    return Head(width, n_valid, offset, d_vocab, int(lm_head.tp_size), fill, route)


def _projection(
    lm_head: Any, bias: Tensor | None, probe: Tensor, width: int
) -> tuple[Callable[[Tensor, Tensor], None], str]:
    """How hidden states meet the weights: accumulated and kept in float32 wherever the weights are plain."""
    weight: Any = getattr(lm_head, "weight", None)
    is_plain = isinstance(weight, Tensor) and weight.dtype == probe.dtype and weight.shape == (width, probe.shape[-1])
    if not is_plain or not type(lm_head.quant_method).__name__.startswith("Unquantized"):
        return _as_it_runs(lm_head, bias), "quantised"
    assert weight is not None
    if weight.dtype == torch.float32:
        return _multiplying(weight, bias, {}), "float32"
    accumulating = _multiplying(weight, bias, {"out_dtype": torch.float32})
    try:
        accumulating(probe, torch.empty((1, width), dtype=torch.float32, device=probe.device))
    except (NotImplementedError, RuntimeError):  # no such product on this device
        return _widening(weight, bias), "widened"
    return accumulating, "float32 accumulation"


def _as_it_runs(lm_head: Any, bias: Tensor | None) -> Callable[[Tensor, Tensor], None]:
    def project(hidden: Tensor, out: Tensor) -> None:
        out.copy_(lm_head.quant_method.apply(lm_head, hidden, bias=bias))

    return project


def _multiplying(weight: Tensor, bias: Tensor | None, wider: dict[str, Any]) -> Callable[[Tensor, Tensor], None]:
    """One product; on a GPU half-precision factors can be summed and written in float32."""

    def project(hidden: Tensor, out: Tensor) -> None:
        torch.mm(hidden, weight.t(), out=out, **wider)
        if bias is not None:
            out.add_(bias)

    return project


def _widening(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor], None]:
    """Where a product cannot be written wider than its factors: the weights in float32, block by block."""

    def project(hidden: Tensor, out: Tensor) -> None:
        wide = hidden.float()
        for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
            block = weight[start : start + VOCABULARY_BLOCK].float()
            out[:, start : start + len(block)] = wide @ block.t()
        if bias is not None:
            out.add_(bias)

    return project
