"""The edge of a top-p nucleus on a GPU: one kernel program per row, no sorting, no device synchronisation.

The edge's logit is the lowest value above which less than top_p of the mass lies. It is found by search between bounds:
each pass over the row measures the mass above three cuts at once, and keeps the stretch between two of them, until one
value is left. The first cuts are evenly spaced in the logits, the others in the bits of a float, which as an integer
are in the order of the values; of a 16-bit float only those 16. Masses are summed in float64.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK, _WARPS, _EVEN_PASSES = 2048, 8, 2
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits that are 0 after widening


@triton.jit
def _ordered(x, UNUSED: tl.constexpr):
    """Bits of float32 values as integers in the values' order, without the unused ones; −0 is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED


@triton.jit
def _value(key, UNUSED: tl.constexpr):
    """The value that `_ordered` made an integer of."""
    wide = (key << UNUSED) | tl.where(key < 0, (1 << UNUSED) - 1, 0)
    return (wide ^ ((wide >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _loaded(start, ids, width, temperature, IS_DIVIDED: tl.constexpr):
    """Values by which tokens are ordered; −inf beyond the row."""
    x = tl.load(start + ids, ids < width, float("-inf")).to(tl.float32)
    return tl.math.div_rn(x, temperature) if IS_DIVIDED else x


@triton.jit
def _total(start, width, temperature, scale, BLOCK: tl.constexpr, IS_DIVIDED: tl.constexpr):
    """The highest value and Σ exp of what the values lie below it."""
    columns = tl.arange(0, BLOCK)
    lane = tl.full([BLOCK], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        x = _loaded(start, first + columns, width, temperature, IS_DIVIDED)
        higher = tl.maximum(lane, x)
        mass = mass * tl.exp((lane - higher) * scale) + tl.exp((x - higher) * scale)
        lane = higher
    top = tl.max(lane, axis=0)
    return top, tl.sum((mass * tl.exp((lane - top) * scale)).to(tl.float64), axis=0)


@triton.jit
def _edge_kernel(
    logits,
    edges,
    stride,
    width,
    temperature,
    scale,
    top_p,
    least,
    BLOCK: tl.constexpr,
    UNUSED: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    EVEN_PASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    columns = tl.arange(0, BLOCK)
    top, total = _total(start, width, temperature, scale, BLOCK, IS_DIVIDED)
    target = top_p * total

    # tokens below this weigh less than 1 − top_p together, whatever their number
    floor = top + (least + tl.log(total.to(tl.float32))) / scale
    low = _ordered(floor, UNUSED).to(tl.int64) - 1  # the edge is above this
    high = _ordered(top, UNUSED).to(tl.int64)  # and not above this
    above_high = target * 0
    passes = 0
    while high - low > 1:
        if passes < EVEN_PASSES:
            lowest, highest = _value((low + 1).to(tl.int32), UNUSED), _value(high.to(tl.int32), UNUSED)
            step = (highest - lowest) * 0.25
            key_1 = _ordered(lowest + step, UNUSED).to(tl.int64)
            key_2 = _ordered(lowest + step * 2, UNUSED).to(tl.int64)
            key_3 = _ordered(lowest + step * 3, UNUSED).to(tl.int64)
        else:
            part = (high - low + 3) // 4
            key_1, key_2, key_3 = low + part, low + part * 2, low + part * 3
        key_1 = tl.minimum(tl.maximum(key_1, low + 1), high - 1)
        key_2 = tl.minimum(tl.maximum(key_2, low + 1), high - 1)
        key_3 = tl.minimum(tl.maximum(key_3, low + 1), high - 1)
        cut_1, cut_2 = _value(key_1.to(tl.int32), UNUSED), _value(key_2.to(tl.int32), UNUSED)
        cut_3 = _value(key_3.to(tl.int32), UNUSED)
        part_1 = tl.zeros([BLOCK], tl.float32)
        part_2 = tl.zeros([BLOCK], tl.float32)
        part_3 = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            x = _loaded(start, first + columns, width, temperature, IS_DIVIDED)
            mass = tl.exp((x - top) * scale)
            part_1 += tl.where(x > cut_1, mass, 0.0)
            part_2 += tl.where(x > cut_2, mass, 0.0)
            part_3 += tl.where(x > cut_3, mass, 0.0)
        above_1 = tl.sum(part_1.to(tl.float64), axis=0)
        above_2 = tl.sum(part_2.to(tl.float64), axis=0)
        above_3 = tl.sum(part_3.to(tl.float64), axis=0)
        # the first cut above which too little lies is the new upper bound, the one before it the lower
        if above_1 < target:
            high, above_high = key_1, above_1
        elif above_2 < target:
            low, high, above_high = key_1, key_2, above_2
        elif above_3 < target:
            low, high, above_high = key_2, key_3, above_3
        else:
            low = key_3
        passes += 1

    value = _value(high.to(tl.int32), UNUSED)
    wanted = tl.ceil(((target - above_high) / tl.exp((value - top) * scale)).to(tl.float32))
    wanted = tl.minimum(tl.maximum(wanted, 1.0), 1.0 * width).to(tl.int32)  # tokens with that value that are kept
    edge = wanted * 0
    before = wanted * 0
    for first in range(0, width, BLOCK):
        if before < wanted:
            x = _loaded(start, first + columns, width, temperature, IS_DIVIDED)
            equal = (x == value) & (first + columns < width)
            count = tl.sum(equal.to(tl.int32), axis=0)
            if count > 0:
                rank = before + tl.cumsum(equal.to(tl.int32), axis=0)
                edge = tl.maximum(edge, tl.max(tl.where(equal & (rank <= wanted), first + columns, 0), axis=0))
            before += count
    tl.store(edges + row, edge.to(tl.int64))


def top_p_edges_on_gpu(
    logits: Float[Tensor, "rows d_vocab"], top_p: float, temperature: float = 1.0
) -> Int[Tensor, " rows"]:
    """The last token of each row's top-p set, in the order "higher logit first, lower id first among equals".

    Args:
        logits: float32, bfloat16 or float16, on a GPU, the columns of a row next to each other. The set is that of
            float32 logits divided by the temperature.
        top_p: in (0, 1), not within rounding of 1.
        temperature: T.
    """
    edges = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
    # division by T can make neighbours in float32 equal, never in a narrower dtype, where it need not be carried out
    divided = temperature != 1 and logits.dtype == torch.float32
    if len(edges):
        _edge_kernel[(len(edges),)](
            logits,
            edges,
            logits.stride(0),
            logits.shape[1],
            float(temperature),
            1.0 if divided else 1 / temperature,
            float(top_p),
            math.log((1 - top_p) / logits.shape[1]) - 1e-3,  # less what rounding may take
            BLOCK=_BLOCK,
            UNUSED=_UNUSED_BITS[logits.dtype],
            IS_DIVIDED=divided,
            EVEN_PASSES=_EVEN_PASSES,
            num_warps=_WARPS,
        )
    return edges
