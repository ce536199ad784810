"""`row_sums` on a GPU: one program per row, which reads every logit once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _row_sums_kernel(
    logits,
    tokens,
    sums,
    stride,
    n_valid,
    offset,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * stride
    top = -float("inf")
    total = 0.0
    for first in range(0, n_valid, SIZE):
        columns = first + tl.arange(0, SIZE)
        x = tl.load(start_of_row + columns, mask=columns < n_valid, other=-float("inf"))
        higher = tl.maximum(top, tl.max(x, axis=0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)
        top = higher
    local = tl.load(tokens + row) - offset
    owned = (local >= 0) & (local < n_valid)
    own = tl.load(start_of_row + local, mask=owned, other=0.0)
    tl.store(sums + row * 3, top)
    tl.store(sums + row * 3 + 1, total)
    tl.store(sums + row * 3 + 2, own)


def launch(logits: Tensor, tokens: Tensor, n_valid: int, offset: int) -> Tensor:
    """Runs the kernel; see `row_sums.row_sums` for the meaning."""
    sums = torch.empty((len(logits), 3), dtype=torch.float32, device=logits.device)
    _row_sums_kernel[(len(logits),)](
        logits,
        tokens,
        sums,
        logits.stride(0),
        n_valid,
        offset,
        SIZE=BLOCK,
        num_warps=8,  # pyright: ignore[reportCallIssue]
    )
    return sums
