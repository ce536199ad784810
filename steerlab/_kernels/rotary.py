"""Rotary position embedding of one new token per row on a GPU, queries and keys in one kernel.

Source:
    Su et al. 2021, RoFormer (arXiv:2104.09864), in the form in which Hugging Face's models have it: the first half of a
    head's dimensions is paired with the second.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.availability import on_own_device, runs_kernels
from steerlab._kernels.overlap import overlapping, wait_for_previous

_WARPS = 1


@triton.jit
def _rotate(
    query,
    key,
    cos,
    sin,
    out,
    n_query,
    query_row,
    query_head,
    key_row,
    key_head,
    angle_row,
    half,
    HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One head of one row; queries first, then keys."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    n_heads = tl.num_programs(1)
    start = query + row * query_row + head * query_head
    if head >= n_query:
        start = key + row * key_row + (head - n_query) * key_head
    inner = tl.arange(0, HALF)
    inside = inner < half
    first = tl.load(start + inner, inside).to(tl.float32)
    second = tl.load(start + half + inner, inside).to(tl.float32)
    angle = row * angle_row + inner
    cos_1 = tl.load(cos + angle, inside).to(tl.float32)
    cos_2 = tl.load(cos + angle + half, inside).to(tl.float32)
    sin_1 = tl.load(sin + angle, inside).to(tl.float32)
    sin_2 = tl.load(sin + angle + half, inside).to(tl.float32)
    target = out + (row * n_heads + head) * 2 * half + inner
    tl.store(target, (first * cos_1 - second * sin_1).to(out.dtype.element_ty), inside)
    tl.store(target + half, (second * cos_2 + first * sin_2).to(out.dtype.element_ty), inside)


def can_rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes these: one token per row, and an angle for every dimension of a head."""
    return (
        runs_kernels(query)
        and query.dim() == key.dim() == 4
        and query.shape[2] == key.shape[2] == 1
        and key.stride(-1) == 1
        and cos.shape == sin.shape == (cos.shape[0], 1, query.shape[3])
        and cos.shape[0] in (1, query.shape[0])
        and cos.stride(-1) == sin.stride(-1) == 1
        and cos.stride(0) == sin.stride(0)
        and query.shape[3] % 2 == 0
        and query.dtype == key.dtype != torch.float64
    )


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [rows, heads, 1, d_head] and keys, turned by the angles [rows or 1, 1, d_head] of their positions."""
    out = _rotated(query, key, cos, sin)
    return out[:, : query.shape[1]], out[:, query.shape[1] :]


@torch.library.custom_op("steerlab::rotate", mutates_args=())
@on_own_device
def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n_rows, n_query, _, d_head = query.shape
    n_heads = n_query + key.shape[1]
    out = query.new_empty(n_rows, n_heads, 1, d_head)
    _rotate[(n_rows, n_heads)](
        query,
        key,
        cos,
        sin,
        out,
        n_query,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        d_head // 2,
        HALF=triton.next_power_of_2(d_head // 2),
        num_warps=_WARPS,
        **overlapping(query.device),
    )
    return out


@_rotated.register_fake
def _(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n_rows, n_query, _, d_head = query.shape
    return query.new_empty(n_rows, n_query + key.shape[1], 1, d_head)
