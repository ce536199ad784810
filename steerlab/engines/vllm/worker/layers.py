"""A vLLM model's decoder layers, and the stream that each puts out."""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from steerlab.core.errors import HookPointError
from steerlab.engines.vllm.worker import op as op
from steerlab.engines.vllm.worker.tables import LayerTables

StreamRule: TypeAlias = Literal["single", "sum", "first"]
"""How a layer's output holds the stream: one tensor; (hidden, residual) that add up to it; or a tuple whose first
element is it."""

_BUFFERS = ("tokens", "counts", "runs", "units", "params", "tallies", "readings")


def find_layers(model: nn.Module, n_layers: int) -> list[nn.Module | None]:
    """The decoder layers in order; None for one that lives on another pipeline rank.

    Raises:
        HookPointError: if the model has no list of that many layers, or several.
    """
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=True)
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    }
    outermost = {n: m for n, m in found.items() if not any(n.startswith(f"{o}.") for o in found)}
    text = {n: m for n, m in outermost.items() if "language_model" in n} or outermost
    if len(text) != 1:
        raise HookPointError(
            f"{type(model).__name__} has {len(text)} lists of {n_layers} layers ({', '.join(text) or 'none'}); which "
            "of them is the residual stream is not known, so this family cannot be steered inside vLLM."
        )
    (layers,) = text.values()
    return [None if is_elsewhere(layer) else layer for layer in layers]


def is_elsewhere(layer: nn.Module) -> bool:
    """Whether this only stands in for a layer of another pipeline rank."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(layer, PPMissingLayer)


def stream_parts(output: Any, rule: StreamRule) -> tuple[Tensor, Tensor | None]:
    """The tensor that an edit changes, and what the stream consists of beside it."""
    if rule == "single":
        return output, None
    return output[0], (output[1] if rule == "sum" else None)


def attach(layer: nn.Module, tables: LayerTables, rule: StreamRule) -> None:
    """Puts the operator after a layer. Must happen before the model is compiled: later hooks never fire there."""
    for name in _BUFFERS:
        layer.register_buffer(f"steerlab_{name}", getattr(tables, name), persistent=False)

    def edit(module: Any, _: Any, output: Any) -> Any:
        hidden, residual = stream_parts(output, rule)
        torch.ops.steerlab.edit(
            hidden,
            residual,
            module.steerlab_tokens,
            module.steerlab_counts,
            module.steerlab_runs,
            module.steerlab_units,
            module.steerlab_params,
            module.steerlab_tallies,
            module.steerlab_readings,
        )
        return output

    layer.register_forward_hook(edit)
