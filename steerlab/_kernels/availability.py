"""Whether Triton kernels can run where a tensor is."""

import functools
import importlib.util

from torch import Tensor


def runs_kernels(rows: Tensor) -> bool:
    """Whether rows are on an NVIDIA GPU, their columns next to each other, and Triton is there."""
    return rows.is_cuda and rows.stride(-1) == 1 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
