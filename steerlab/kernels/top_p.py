"""The edge of a top-p nucleus on a GPU: one kernel program per row, no sorting, no device synchronisation.

The edge's logit is the lowest value above which less than top_p of the mass lies. It is found by search over the bits
of a float, which as an integer are in the order of the values: each pass over the row measures the mass above `_WAYS`
cuts at once, and keeps the stretch between two of them, until one value is left. Masses are summed in float64.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK, _WAYS, _WARPS = 1024, 4, 8


@triton.jit
def _ordered(x):
    """Bits of float32 values as integers in the values' order; −0 is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _edge_kernel(scaled, edges, stride, width, top_p, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = scaled + row * stride
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, width, BLOCK):
        highest = tl.maximum(highest, tl.load(start + first + columns, first + columns < width, float("-inf")))
    top = tl.max(highest, axis=0)
    masses = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        x = tl.load(start + first + columns, first + columns < width, float("-inf"))
        masses += tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
    target = top_p * tl.sum(masses.to(tl.float64), axis=0)

    ways = tl.arange(0, WAYS)
    low = tl.full([], -2147483649, tl.int64)  # the edge's bits are above this
    high = _ordered(top).to(tl.int64)  # and not above this
    above_high = tl.sum(tl.zeros([WAYS], tl.float64), axis=0)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        cuts = tl.minimum(low + step * (ways + 1), high)
        parts = tl.zeros([BLOCK, WAYS], tl.float32)  # summed across the block once per pass
        for first in range(0, width, BLOCK):
            x = tl.load(start + first + columns, first + columns < width, float("-inf"))
            mass = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
            is_above = _ordered(x)[:, None] > cuts.to(tl.int32)[None, :]
            parts += tl.where(is_above, mass[:, None], 0.0)
        found = tl.sum(parts.to(tl.float64), axis=0)
        too_low = tl.sum(((found >= target) & (ways < WAYS - 1)).to(tl.int32), axis=0)
        low = tl.where(too_low > 0, tl.sum(tl.where(ways == too_low - 1, cuts, 0), axis=0), low)
        high = tl.sum(tl.where(ways == too_low, cuts, 0), axis=0)
        above_high = tl.sum(tl.where(ways == too_low, found, 0.0), axis=0)

    bits = high.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    wanted = tl.ceil(((target - above_high) / tl.exp(value - top)).to(tl.float32))
    wanted = tl.minimum(tl.maximum(wanted, 1.0), 1.0 * width).to(tl.int32)  # tokens with that value that are kept
    edge = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int32)
    for first in range(0, width, BLOCK):
        x = tl.load(start + first + columns, first + columns < width, float("nan"))
        equal = (_ordered(x) == bits) & (first + columns < width)
        rank = before + tl.cumsum(equal.to(tl.int32), axis=0)
        edge = tl.maximum(edge, tl.max(tl.where(equal & (rank <= wanted), first + columns, 0), axis=0))
        before += tl.sum(equal.to(tl.int32), axis=0)
    tl.store(edges + row, edge.to(tl.int64))


def top_p_edges_on_gpu(scaled: Float[Tensor, "rows d_vocab"], top_p: float) -> Int[Tensor, " rows"]:
    """The last token of each row's top-p set, in the order "higher logit first, lower id first among equals".

    Args:
        scaled: float32 logits divided by the temperature, on a GPU, the columns of a row next to each other.
        top_p: in (0, 1), not within rounding of 1.
    """
    edges = torch.empty(scaled.shape[0], dtype=torch.long, device=scaled.device)
    if len(edges):
        _edge_kernel[(len(edges),)](
            scaled, edges, scaled.stride(0), scaled.shape[1], top_p, BLOCK=_BLOCK, WAYS=_WAYS, num_warps=_WARPS
        )
    return edges
