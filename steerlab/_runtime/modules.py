"""Modules of a model: all inside one, what a wrapper wraps, where a module lies, and what a model holds."""

from collections.abc import Iterator

import torch
from torch import nn


def modules_in(root: nn.Module) -> list[nn.Module]:
    """A module and all inside it, each once, in torch's order.

    `Module.modules` spells every module's name on the way, which in a bridge of a thousand modules takes milliseconds;
    this is for what every call asks.
    """
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                waiting.extend(reversed(module._modules.values()))
    return list(found)


def unwrapped(module: nn.Module) -> nn.Module:
    """What a bridge's wrapper wraps; a module that is no wrapper is itself."""
    while (inner := module._modules.get("_original_component")) is not None:
        module = inner
    return module


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module's first parameter or buffer lies; None without either."""
    tensor = next(module.parameters(), None)
    if tensor is None:
        tensor = next(module.buffers(), None)
    return None if tensor is None else tensor.device


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model, each once, as `Module.parameters`."""
    found: dict[int, nn.Parameter] = {}
    for module in modules_in(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
    yield from found.values()
