"""Whether Triton kernels can run where a tensor is."""

import importlib.util

from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_kernels(rows: Tensor) -> bool:
    """Whether rows are on an NVIDIA GPU, their columns next to each other, and Triton is there."""
    return _HAS_TRITON and rows.is_cuda and rows.stride(-1) == 1
