"""Copies between GPUs by a kernel of the one that takes, which reads the other's memory (peer access).

A copy engine takes longer to begin than a few kilobytes take to arrive, and a graph has to end before it.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.availability import on_own_device

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _take(source, target, n, BLOCK: tl.constexpr):
    """One block of a tensor's words."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < n), at < n)


@on_own_device
def take(target: Tensor, source: Tensor) -> None:
    """Copies a tensor from another device, whose stream the caller has waited for.

    Args:
        target: contiguous, on the device that reads.
        source: likewise, of the same shape and dtype, where `can_read` says that it can be read.
    """
    word = torch.int32 if source.numel() * source.element_size() % 4 == 0 else torch.uint8
    source, target = source.view(-1).view(word), target.view(-1).view(word)
    _take[(-(-len(source) // _BLOCK),)](source, target, len(source), BLOCK=_BLOCK, num_warps=_WARPS)
