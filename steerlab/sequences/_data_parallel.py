"""Gradients under DistributedDataParallel: averaged over the processes as in any other training step.

The wrapper prepares its averaging in its own forward. Running the model inside without it would leave every process
with its own gradients, and say nothing; so a pass with gradients runs inside the wrapper's forward, once per scoring
call however many batches it has, because the processes must enter it equally often.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steerlab.core.errors import InputError

T = TypeVar("T", bound=list[dict[str, Tensor]])


def inside_forward(wrapper: DistributedDataParallel, work: Callable[[], T]) -> T:
    """The result of `work`, run in place of the wrapped model, so that a later backward averages gradients.

    Args:
        wrapper: the wrapper.
        work: what to run. The wrapper may put nodes of its own behind the tensors it returns: use what comes back.

    Raises:
        InputError: for a wrapper with a mixed precision of its own.
    """
    if getattr(wrapper, "mixed_precision", None) is not None:
        raise InputError(
            "This DistributedDataParallel casts parameters by its own mixed_precision, which scoring cannot follow. "
            "Make it without, and set precision.tf_withgrad to {'autocast': True, 'dtype': 'bfloat16'}."
        )
    model = wrapper._modules["module"]
    assert model is not None
    wrapper._modules["module"] = _StandIn(model, work)
    try:
        return wrapper()
    finally:
        wrapper._modules["module"] = model


class _StandIn(nn.Module):
    """Runs one piece of work as its forward, and holds what the model holds, since the wrapper broadcasts buffers."""

    def __init__(self, model: nn.Module, work: Callable[[], list[dict[str, Tensor]]]) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not as a submodule: names must be the model's own
        self.work = work

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """The model's modules, of which torch makes every list of parameters and buffers."""
        return self.__dict__["model"].named_modules(*args, **kwargs)

    def forward(self) -> list[dict[str, Tensor]]:
        return self.work()
