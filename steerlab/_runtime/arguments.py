"""What a model's forward pass takes: families differ."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def optional_arguments(model: Any, *names: str) -> list[str]:
    """Which of these arguments the model's forward takes."""
    # a forward of the model's own may be a closure that holds the model: nothing of it is kept
    replaced = "forward" in getattr(model, "__dict__", {})
    known = inspect.signature(model.forward).parameters if replaced else _arguments(type(model).forward)
    return [name for name in names if name in known]


@functools.lru_cache(maxsize=256)
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
