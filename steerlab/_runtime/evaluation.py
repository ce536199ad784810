"""A model in evaluation mode for the length of a call."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from steerlab._runtime.modules import modules_in


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs the body with every module in evaluation mode; each gets its own mode back afterwards."""
    training = [module for module in modules_in(model) if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
