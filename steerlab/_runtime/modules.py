"""Modules of a model: all inside one, what a wrapper wraps, and where a module lies."""

import torch
from torch import nn


def modules_in(root: nn.Module) -> list[nn.Module]:
    """A module and all inside it, each once: `modules()` several times as fast, as that makes every name on the way."""
    found, known = [root], {root}
    for module in found:  # which grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


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
