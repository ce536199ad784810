"""Modules of a model: what a wrapper wraps, and where a module lies."""

import torch
from torch import nn


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
