"""What a model's forward pass takes: families differ."""

import inspect
from typing import Any


def optional_arguments(model: Any, *names: str) -> list[str]:
    """Which of these arguments the model's forward takes."""
    known = inspect.signature(model.forward).parameters
    return [name for name in names if name in known]
