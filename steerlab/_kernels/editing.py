"""One edit of the stream of one new token per row on a GPU, in one kernel, with the counts that receipts need."""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.availability import on_own_device, runs_kernels
from steerlab._kernels.overlap import overlapping, wait_for_previous

_WIDEST, _WARPS = 16384, 8


@triton.jit
def _edit(
    stream, changed, reads, writes, gates, keeps, index, selected, factors, edited, changes, stride, n_terms, width,
    n_columns, tiny, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: h + f·Σ g(r·h + b)·w where it is selected, and by how much that changed it."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    inside = inner < width
    stored = tl.load(stream + row * stride + inner, inside, 0.0)
    at = tl.load(index + row)
    place = row * n_columns + tl.maximum(at, 0)
    if (at >= 0) & (tl.load(selected + place) != 0):
        h = stored.to(tl.float32)
        delta = tl.zeros([BLOCK], tl.float32)
        for term in range(n_terms):
            gate = gates + term * 7
            z = tl.sum(h * tl.load(reads + term * width + inner, inside, 0.0), axis=0) + tl.load(gate + 6)
            clipped = tl.minimum(tl.maximum(z, tl.load(gate + 2)), tl.load(gate + 3))
            value = tl.load(gate) + tl.load(gate + 4) * z + tl.load(gate + 1) * clipped
            value = tl.where(z > tl.load(gate + 5), value, 0.0)
            delta += value * tl.load(writes + term * width + inner, inside, 0.0)
        delta *= tl.load(factors + place)
        norm = tl.sqrt(tl.sum(h * h, axis=0))
        if tl.load(keeps) != 0:
            wanted = h + delta
            after = tl.sqrt(tl.sum(wanted * wanted, axis=0))
            delta = wanted * tl.where(after > 0, norm / after, 1.0) - h
        size = tl.sqrt(tl.sum(delta * delta, axis=0))
        tl.store(edited + row, tl.load(edited + row) + 1)
        tl.store(changes + row, tl.load(changes + row) + size / tl.maximum(norm, tiny))
        stored = (h + delta.to(stored.dtype).to(tl.float32)).to(stored.dtype)
    tl.store(changed + row * width + inner, stored, inside)


def can_edit(stream: Tensor) -> bool:
    """Whether the kernel takes this stream, [rows, 1, d_model]."""
    return (
        runs_kernels(stream)
        and stream.dim() == 3
        and stream.shape[1] == 1
        and stream.shape[2] <= _WIDEST
        and stream.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


@torch.library.custom_op("steerlab::edit_new_tokens", mutates_args=("edited", "changes"))
@on_own_device
def edit(
    stream: Tensor,
    reads: Tensor,
    writes: Tensor,
    gates: Tensor,
    keeps: Tensor,
    index: Tensor,
    selected: Tensor,
    factors: Tensor,
    edited: Tensor,
    changes: Tensor,
) -> Tensor:
    """The stream [rows, 1, d_model] after one edit.

    Args:
        stream: as it was.
        reads: of each term, [terms, d_model]; float32, like all that are numbers.
        writes: of each term, likewise.
        gates: amount, gain, lo, hi, slope, threshold and bias of each term, [terms, 7].
        keeps: whether the norm is kept, [].
        index: the column of each row, [rows, 1]; negative where nothing is edited.
        selected: by row and column, whether it is edited.
        factors: by row and column, what multiplies the change.
        edited: of each row, to which 1 is added where it is edited.
        changes: of each row, to which ‖Δ‖/‖h‖ is added there.
    """
    n_rows, _, width = stream.shape
    out = torch.empty_like(stream, memory_format=torch.contiguous_format)
    _edit[(n_rows,)](
        stream,
        out,
        reads,
        writes,
        gates,
        keeps,
        index,
        selected,
        factors,
        edited,
        changes,
        stream.stride(0),
        len(reads),
        width,
        selected.shape[1],
        torch.finfo(torch.float32).tiny,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_WARPS,
        **overlapping(stream.device),
    )
    return out


@edit.register_fake
def _(stream: Tensor, *_: Tensor) -> Tensor:
    return stream.new_empty(stream.shape)
