"""Linear maps of a few rows on a GPU: several weights, which read the same rows, in one kernel.

A pass over one token per row reads every weight once and computes little, so that it takes as long as the reading.
Small matrices read alone leave most of the card idle.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.availability import on_own_device, runs_kernels, shared_memory
from steerlab._kernels.matvec import MATVEC_OUTPUTS, MATVEC_ROWS, MOST_WEIGHTS, divided, matvec, of_output
from steerlab._kernels.overlap import overlapping, wait_for_previous

MOST_ROWS = 32


@dataclass(frozen=True)
class Blocks:
    """How a map is divided.

    Attributes:
        width: outputs of a block.
        depth: inputs of a block.
        stages: how many blocks of inputs are under way at once, where memory suffices.
        warps: that compute a block.
        policy: what the cache does with weights once read: `evict_first`, or nothing of its own.
    """

    width: int
    depth: int
    stages: int = 4
    warps: int = 2
    policy: str = ""


_FEW, _MANY, _MANY_OUTPUTS = Blocks(16, 512, 4), Blocks(64, 256, 3, 4), 6144
"""Fastest on an H200 for few outputs, so that all processors work, and for many; from how many on they are many.

`benchmarks/decode_linear.py` compares others.
"""


@triton.jit
def _linear(
    rows,
    out,
    weight_1,
    weight_2,
    weight_3,
    bias_1,
    bias_2,
    bias_3,
    first_2,
    first_3,
    n_rows,
    depth,
    width,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    POLICY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One stretch of outputs, all of one weight."""
    first = tl.program_id(0) * WIDTH
    weight, bias, place = of_output(first, weight_1, weight_2, weight_3, bias_1, bias_2, bias_3, first_2, first_3)
    wait_for_previous(OVERLAPS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inner = tl.arange(0, DEPTH)
    weights = weight + (place + column)[None, :].to(tl.int64) * depth + inner[:, None]
    values = rows + row[:, None] * depth + inner[None, :]
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for _ in tl.range(0, depth, DEPTH, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        x = tl.load(values, mask=row[:, None] < n_rows, other=0.0)
        block = tl.load(weights, eviction_policy=POLICY)  # pyright: ignore[reportArgumentType]
        total = tl.dot(x, block, total)
        weights += DEPTH
        values += DEPTH
    if HAS_BIAS:
        total += tl.load(bias + place + column)[None, :].to(tl.float32)
    target = out + row[:, None] * width + first + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=row[:, None] < n_rows)


def can_map(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Whether one kernel can do it: half precision, few rows one after the other, whole blocks of each weight."""
    n_rows = rows.numel() // rows.shape[-1]
    width, depth = (MATVEC_OUTPUTS, 1) if n_rows <= MATVEC_ROWS else (_FEW.width, _FEW.depth)
    return (
        runs_kernels(rows)
        and rows.is_contiguous()
        and rows.dtype in (torch.bfloat16, torch.float16)
        and n_rows <= MOST_ROWS
        and len(weights) <= MOST_WEIGHTS
        and all(w.dtype == rows.dtype and w.is_contiguous() and w.device == rows.device for w in weights)
        and all(n % width == 0 and d % depth == 0 and d == rows.shape[-1] for n, d in (w.shape for w in weights))
        and len({bias is None for bias in biases}) == 1
    )


def linear_maps(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """What each linear map gives for the rows; `can_map` says for which.

    Args:
        rows: shape [..., d_in].
        weights: each of shape [d_out, d_in], of the rows' dtype.
        biases: each of shape [d_out], or all None.

    Returns:
        For each weight, shape [..., d_out]; parts of one tensor.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    out = _mapped(flat, list(weights), [bias for bias in biases if bias is not None])
    return [part.unflatten(0, rows.shape[:-1]) for part in out.split([len(w) for w in weights], dim=1)]


@torch.library.custom_op("steerlab::linear_maps", mutates_args=())
@on_own_device
def _mapped(rows: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    if len(rows) <= MATVEC_ROWS:
        return matvec(rows, weights, biases)
    return mapped(rows, weights, biases, blocks_for([len(weight) for weight in weights]))


@_mapped.register_fake
def _(rows: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return rows.new_empty(len(rows), sum(len(weight) for weight in weights))


def blocks_for(sizes: Sequence[int]) -> Blocks:
    """The blocks for maps of so many outputs each."""
    is_wide = sum(sizes) >= _MANY_OUTPUTS and all(size % _MANY.width == 0 for size in sizes)
    return _MANY if is_wide else _FEW


def mapped(rows: Tensor, weights: list[Tensor], biases: list[Tensor], blocks: Blocks) -> Tensor:
    """What the maps give for rows [n, d_in], side by side: [n, outputs of all]; `biases` of all weights or of none."""
    n_rows, depth = rows.shape
    out, parts = divided(rows, weights, biases)
    lanes = max(16, triton.next_power_of_2(n_rows))
    _linear[(out.shape[1] // blocks.width,)](
        rows,
        out,
        *parts,
        n_rows,
        depth,
        out.shape[1],
        HAS_BIAS=bool(biases),
        ROWS=lanes,
        WIDTH=blocks.width,
        DEPTH=blocks.depth,
        STAGES=_stages(shared_memory(rows.device), lanes, blocks),
        POLICY=blocks.policy,
        num_warps=blocks.warps,
        **overlapping(rows.device),
    )
    return out


def _stages(memory: int, rows: int, blocks: Blocks) -> int:
    """How many blocks of inputs and weights, of two bytes a number, fit into a processor's memory at once."""
    return max(1, min(blocks.stages, memory // (2 * (rows + blocks.width) * blocks.depth)))
