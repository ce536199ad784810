"""Kernels that start while the one before them still runs: programmatic dependent launch, of Hopper GPUs and later.

A pass over one token per row is a few hundred kernels of some microseconds each. Starting one after the other leaves
the memory idle in between; a kernel that has started can read its weights while its rows are not there yet.

Source:
    NVIDIA, CUDA C++ Programming Guide, section "Programmatic Dependent Launch and Synchronization".
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false

import functools

import torch
import triton
import triton.language as tl

_FIRST_TO_RECORD = 12, 3
"""The version of CUDA from which graphs record such launches."""


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Lets the next kernel start, and waits for the one before: a kernel's first step that reads or writes values.

    Every overlapping kernel has to wait, for one that ended before those before it would let the next read too early.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """How a kernel that calls `wait_for_previous` is launched on a device."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    is_known = device.type == "cuda" and version >= _FIRST_TO_RECORD and hasattr(tl.extra.cuda, "gdc_wait")
    if is_known and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}
