"""The operator as a Triton kernel: one program per token, a loop over its directions, float32 throughout.

A program whose token is neither edited nor read loads two numbers and ends. Nothing is read back to the host, and all
pointers are persistent buffers, so the launch can be part of a CUDA graph.
"""

import triton
import triton.language as tl
from torch import Tensor


# No argument may be called `params`: Triton's generated launcher has a variable of that name.
@triton.jit
def _edit_kernel(
    hidden,
    residual,
    tokens,
    counts,
    runs,
    units,
    settings,
    tallies,
    readings,
    hidden_stride,
    residual_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(tokens + token * 3)
    read = tl.load(tokens + token * 3 + 2)
    if (slot >= 0) | (read >= 0):
        position = tl.load(tokens + token * 3 + 1)
        columns = tl.arange(0, BLOCK)
        inside = columns < D
        raw = tl.load(hidden + token * hidden_stride + columns, mask=inside, other=0.0)
        own = raw.to(tl.float32)
        rest = tl.zeros_like(own)
        if HAS_RESIDUAL:
            rest = tl.load(residual + token * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        start = (own + rest).to(raw.dtype).to(tl.float32)  # the stream as the model would round it
        x = start
        place = tl.maximum(slot, 0).to(tl.int64)
        count = tl.where(slot >= 0, tl.load(counts + place), 0)
        for k in range(count):
            row = place * DIRECTIONS + k
            acts = position < 0  # never: no run covers it yet
            for run in tl.static_range(RUNS):  # pyright: ignore[reportGeneralTypeIssues]
                first = tl.load(runs + (row * RUNS + run) * 2)
                last = tl.load(runs + (row * RUNS + run) * 2 + 1)
                acts = acts | ((first <= position) & (position < last))
            if acts:
                unit = tl.load(units + row * D + columns, mask=inside, other=0.0)
                a = tl.load(settings + row * 5)
                g = tl.load(settings + row * 5 + 1)
                lo = tl.load(settings + row * 5 + 2)
                hi = tl.load(settings + row * 5 + 3)
                scale = tl.load(settings + row * 5 + 4)
                projection = tl.sum(x * unit, axis=0)
                norm = tl.sqrt(tl.sum(x * x, axis=0))
                size = scale * (a + g * (tl.minimum(tl.maximum(projection, lo), hi) - projection))
                tl.atomic_add(tallies + row * 2, 1.0)
                tl.atomic_add(tallies + row * 2 + 1, tl.abs(size) / tl.maximum(norm, 1.1754944e-38))
                x = x + size * unit
        changed = (own + (x - start)).to(raw.dtype)
        if slot >= 0:
            tl.store(hidden + token * hidden_stride + columns, changed, mask=inside)
        if read >= 0:
            result = (changed.to(tl.float32) + rest).to(raw.dtype)
            tl.store(readings + read.to(tl.int64) * D + columns, result, mask=inside)


def launch(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    counts: Tensor,
    runs: Tensor,
    units: Tensor,
    settings: Tensor,
    tallies: Tensor,
    readings: Tensor,
) -> None:
    """Runs the kernel on the tokens of a pass; see `op_torch.edit_rows` for the meaning."""
    width = hidden.shape[-1]
    flat = hidden.view(-1, width)
    rest = flat if residual is None else residual.view(-1, width)
    block = triton.next_power_of_2(width)
    _edit_kernel[(flat.shape[0],)](
        flat,
        rest,
        tokens,
        counts,
        runs,
        units,
        settings,
        tallies,
        readings,
        flat.stride(0),
        rest.stride(0),
        D=width,
        BLOCK=block,
        DIRECTIONS=units.shape[1],
        RUNS=runs.shape[2],
        HAS_RESIDUAL=residual is not None,
        num_warps=4 if block <= 4096 else 8,  # pyright: ignore[reportCallIssue]
    )
