"""Kernels of a recorded pass that start while the one before still runs, on GPUs that can: from Hopper on.

Each lets the next one start at once, and itself waits, before it reads or writes what others do too, until the one
before is done. So only launches overlap, and what a kernel reads before it waits: weights, which no kernel of a pass
writes.
"""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from torch import Tensor

_CAPABILITY = (9, 0)
_is_on: ContextVar[bool] = ContextVar("steerlab_overlapping_kernels", default=False)


@contextmanager
def overlapping() -> Iterator[None]:
    """Lets kernels that are launched in the body overlap; nothing there may write weights."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def overlap(rows: Tensor) -> dict[str, bool]:
    """Options of a launch for kernels that take `OVERLAPS`."""
    if _is_on.get() and rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= _CAPABILITY:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Begins a kernel: the next may start as soon as every program of this one has."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Returns when the kernels before are done and what they wrote can be read."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
