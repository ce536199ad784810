"""A vLLM model's decoder layers, and the stream that each puts out."""

from dataclasses import fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from steerlab.core.errors import HookPointError
from steerlab.engines.vllm._worker import op as op
from steerlab.engines.vllm._worker.sublayers import Place, hook
from steerlab.engines.vllm._worker.tables import PointTables

StreamRule: TypeAlias = Literal["single", "sum", "first"]
"""How a layer's output holds the stream: one tensor; (hidden, residual) that add up to it; or a tuple whose first
element is it."""


INSTEAD = "With layers=[] it generates and scores, unsteered."
"""Ends the errors of a family whose stream cannot be identified."""


def find_layers(model: nn.Module, n_layers: int) -> list[nn.Module | None]:
    """The decoder layers in order; None for one that lives on another pipeline rank.

    Raises:
        HookPointError: if the model has no list of that many layers, or several that hold different ones.
    """
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=True)
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    }
    outermost = {n: m for n, m in found.items() if not any(n.startswith(f"{o}.") for o in found)}
    text = {n: m for n, m in outermost.items() if "language_model" in n} or outermost
    if len({tuple(map(id, layers)) for layers in text.values()}) != 1:  # Gemma 4 holds its layers in two lists
        raise HookPointError(
            f"{type(model).__name__} has {len(text)} lists of {n_layers} layers ({', '.join(text) or 'none'}); which "
            f"of them is the residual stream is not known, so this family cannot be steered inside vLLM. {INSTEAD}"
        )
    return [None if is_elsewhere(layer) else layer for layer in next(iter(text.values()))]


def is_elsewhere(layer: nn.Module) -> bool:
    """Whether this only stands in for a layer of another pipeline rank."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(layer, PPMissingLayer)


def stream_parts(output: Any, rule: StreamRule) -> tuple[Tensor, Tensor | None]:
    """The tensor that an edit changes, and what the stream consists of beside it."""
    if rule == "single":
        return output, None
    return output[0], (output[1] if rule == "sum" else None)


def attach(layer: nn.Module, site: str, tables: PointTables, where: "StreamRule | Place") -> None:
    """Puts the operator at a site of a layer. Must happen before the model is compiled: later hooks never fire there.

    Args:
        layer: the layer.
        site: which site.
        tables: what the operator takes there.
        where: the place, if it is inside the layer; else how the layer's output holds the stream.
    """
    module = layer.get_submodule(where.part) if isinstance(where, Place) else layer
    names = [f"steerlab_{site}_{part.name}" for part in fields(PointTables)]
    for name, table in zip(names, tables, strict=True):
        module.register_buffer(name, table, persistent=False)

    def edit(module: Any, hidden: Tensor, residual: Tensor | None) -> None:
        torch.ops.steerlab.edit(hidden, residual, *[getattr(module, name) for name in names])

    if isinstance(where, Place):
        hook(layer, where, edit)
        return

    def after(module: Any, _: Any, output: Any) -> Any:
        edit(module, *stream_parts(output, where))
        return output

    layer.register_forward_hook(after)
