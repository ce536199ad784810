"""Models whose parameters are sharded over processes by torch's `fully_shard` (FSDP2).

A module that it wraps has its parameters whole for the length of its own forward only, and hooks of that forward see to
the gradients. So whatever uses a module's parameters runs in place of its forward, inside its call.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` wraps a module or one inside it."""
    return dist.is_available() and any(_is_wrapped(inner) for inner in module.modules())


def _is_wrapped(module: nn.Module) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def unsharded_type(module: nn.Module) -> type:
    """The type that a module had before `fully_shard` put one of its own in the place."""
    kind = type(module)
    return kind.__bases__[1] if _is_wrapped(module) else kind


def as_forward_of(module: nn.Module, work: Callable[..., T], *args: Any) -> T:
    """The result of `work(*args)`, run as the forward of a sharded module; of any other, run as it is.

    Args:
        module: the module whose parameters `work` uses.
        work: what to run; gives tensors, or lists and dictionaries of them.
        *args: its arguments.
    """
    if not _is_wrapped(module):
        return work(*args)
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda _, *given: work(*given)
    try:
        return module(None, *args)  # on a GPU, fully_shard's own hook fails without any argument
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def reshard(module: nn.Module) -> None:
    """Frees what a forward pass has left whole, as it leaves a root's own parameters; a backward pass does it itself.

    Until then `parameters()` gives whole tensors, and an optimiser or `zero_grad` would take those for the shards.
    """
    for inner in module.modules():
        if _is_wrapped(inner):
            inner.reshard()  # pyright: ignore[reportCallIssue]


def whole(parameter: Tensor) -> Tensor:
    """A parameter without its graph, gathered from all processes if it is a `DTensor`; all must ask for it."""
    detached = parameter.detach()
    return detached.full_tensor() if is_distributed(detached) else detached  # pyright: ignore[reportAttributeAccessIssue]


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def most_of_all(module: nn.Module, count: int) -> int:
    """The largest of a number over the processes that share a sharded module."""
    highest = torch.tensor(count)
    for group, device in _groups(module):
        moved = highest.to(device)
        dist.all_reduce(moved, dist.ReduceOp.MAX, group=group)
        highest = moved.cpu()
    return int(highest)


def _groups(module: nn.Module) -> list[tuple[Any, str]]:
    """The groups of processes along each dimension of the mesh, and the kind of device that they talk about."""
    for parameter in module.parameters():
        if is_distributed(parameter):
            mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
            return [(mesh.get_group(dim), mesh.device_type) for dim in range(mesh.ndim)]
    raise RuntimeError("No parameter of this sharded module is sharded at the moment.")


class _Joined(torch.autograd.Function):
    """Passes tensors on unchanged; a gradient of any of them runs backward through all."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients


def joined(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of several passes such that a gradient of any tensor in them runs backward through all the passes.

    The processes that share a sharded model must run backward through it equally often, also where a loss leaves out
    what one of its passes gave.
    """
    places = [
        (result, name)
        for result in results
        for name, value in result.items()
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if not places:
        return results
    fresh = [dict(result) for result in results]
    found = _Joined.apply(*(result[name] for result, name in places))
    known = {id(result): copy for result, copy in zip(results, fresh, strict=True)}
    for (result, name), tensor in zip(places, found, strict=True):  # pyright: ignore[reportArgumentType]
        known[id(result)][name] = tensor
    return fresh
