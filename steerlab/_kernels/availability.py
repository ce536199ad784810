"""Whether Triton kernels can run where a tensor is, and launching them there."""

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None

P = ParamSpec("P")
R = TypeVar("R")


def runs_kernels(rows: Tensor) -> bool:
    """Whether rows are on an NVIDIA GPU, their columns next to each other, and Triton is there."""
    return _HAS_TRITON and rows.is_cuda and rows.stride(-1) == 1


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of fast memory that one block of a kernel can use; plenty where there is no GPU, as in an interpreter."""
    if device.type != "cuda":
        return 1 << 20
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)


@functools.cache
def can_read(device: torch.device, other: torch.device) -> bool:
    """Whether kernels of one NVIDIA GPU can read the memory of another; if so, they can from now on."""
    if other.type != "cuda" or not runs_kernels(torch.empty(1, device=device)):
        return False
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    torch.empty(1, device=device).to(other)  # torch lets a GPU access another at its first copy to that
    return True


def on_own_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Runs a function that launches kernels with its first argument's device as the current one.

    Triton launches on the current device and its stream, wherever the tensors are. For tensors of another device it
    would read memory that it may not, or before what writes it is done.
    """

    @functools.wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(cast(Tensor, args[0])):
            return launch(*args, **kwargs)

    return launched
