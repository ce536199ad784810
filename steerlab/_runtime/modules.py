"""Modules of a model: what a wrapper wraps, where a module lies, and what a model holds."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn


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
    """The parameters of a model, each once, in the order of its modules.

    `Module.parameters` spells every module's name on the way, which in a bridge of a thousand modules takes
    milliseconds; this is for what every call asks.
    """
    return cast(Iterator[nn.Parameter], _held(model, "_parameters"))


def buffers_of(model: nn.Module) -> Iterator[Tensor]:
    """The buffers of a model, likewise."""
    return _held(model, "_buffers")


def _held(model: nn.Module, kind: str) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        parts = module.__dict__
        for tensor in parts[kind].values():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
        if parts["_modules"]:
            waiting.extend(reversed(parts["_modules"].values()))
