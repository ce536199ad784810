"""Rows of numbers, as other libraries and tools keep them, as tensors [d_model]."""

from typing import Any

import torch
from torch import Tensor

from steerlab.core._numbers import as_list


def row_of(values: Any, *, squeeze: bool = False) -> Tensor | None:
    """A tensor [d_model] from a tensor, an array, a series or a list; None for no row of at least two real numbers.

    Args:
        values: what was given.
        squeeze: take `[1, d_model]` and `[1, 1, d_model]` too, as some tools keep their vectors.

    Examples:
        >>> row_of([3, 4]), row_of([[3, 4]])
        (tensor([3., 4.], dtype=torch.float64), None)
    """
    found = values if isinstance(values, Tensor) else _tensor(values)
    if found is None or found.is_complex() or found.dtype == torch.bool:
        return None
    while squeeze and found.ndim > 1 and found.shape[0] == 1:
        found = found[0]
    return found if found.ndim == 1 and found.numel() >= 2 else None


def shape_of(values: Any) -> str:
    """The shape, or else the type, of what was given in place of a row, for an error message."""
    return str(tuple(values.shape)) if hasattr(values, "shape") else type(values).__name__


def _tensor(values: Any) -> Tensor | None:
    listed = as_list(values, ordered=True)
    inner = listed
    while inner and isinstance(inner[0], list | tuple):
        inner = inner[0]
    if not inner or any(isinstance(value, bool | str) for value in inner):
        return None
    try:
        return torch.as_tensor(listed, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError):
        return None
