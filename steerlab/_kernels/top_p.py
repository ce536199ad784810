"""The edge of a top-p nucleus on a GPU: one kernel program per row, no sorting, no device synchronisation.

The edge's logit is the lowest value above which less than top_p of the mass lies. It is found by search between bounds:
each pass over the row measures the mass above three cuts at once, and keeps the stretch between two of them, until one
value is left. The first cuts are evenly spaced in the logits; then they stand around the place where the edge would lie
if mass were even between the bounds, and every other time they are evenly spaced in the bits of a float, which as an
integer are in the order of the values (of a 16-bit float only those 16). Masses are summed in float64.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from steerlab._kernels.availability import on_own_device

_BLOCK, _WARPS = 1024, 4
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
def _read(start, ids, width):
    """Logits as they are stored; −inf beyond the row. Loops read a block ahead of the one they work on."""
    return tl.load(start + ids, ids < width, float("-inf"))


@triton.jit
def _widened(x, temperature, IS_DIVIDED: tl.constexpr):
    """Values by which tokens are ordered."""
    wide = x.to(tl.float32)
    return tl.math.div_rn(wide, temperature) if IS_DIVIDED else wide


@triton.jit
def _total(start, width, temperature, scale, BLOCK: tl.constexpr, IS_DIVIDED: tl.constexpr):
    """The highest value and Σ 2^(scale·what the values lie below it)."""
    columns = tl.arange(0, BLOCK)
    lane = tl.full([BLOCK], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    following = _read(start, columns, width)
    for first in range(0, width, BLOCK):
        x = _widened(following, temperature, IS_DIVIDED)
        following = _read(start, first + BLOCK + columns, width)
        higher = tl.maximum(lane, x)
        mass = mass * tl.exp2((lane - higher) * scale) + tl.exp2((x - higher) * scale)
        lane = higher
    top = tl.max(lane, axis=0)
    return top, tl.sum((mass * tl.exp2((lane - top) * scale)).to(tl.float64), axis=0)


@triton.jit
def _masses_above(
    start, width, temperature, scale, top, cut_1, cut_2, cut_3, BLOCK: tl.constexpr, IS_DIVIDED: tl.constexpr
):
    """The mass above each of three cuts."""
    columns = tl.arange(0, BLOCK)
    part_1 = tl.zeros([BLOCK], tl.float32)
    part_2 = tl.zeros([BLOCK], tl.float32)
    part_3 = tl.zeros([BLOCK], tl.float32)
    following = _read(start, columns, width)
    for first in range(0, width, BLOCK):
        x = _widened(following, temperature, IS_DIVIDED)
        following = _read(start, first + BLOCK + columns, width)
        mass = tl.exp2((x - top) * scale)
        part_1 += tl.where(x > cut_1, mass, 0.0)
        part_2 += tl.where(x > cut_2, mass, 0.0)
        part_3 += tl.where(x > cut_3, mass, 0.0)
    above_1 = tl.sum(part_1.to(tl.float64), axis=0)
    above_2 = tl.sum(part_2.to(tl.float64), axis=0)
    return above_1, above_2, tl.sum(part_3.to(tl.float64), axis=0)


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
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    columns = tl.arange(0, BLOCK)
    top, total = _total(start, width, temperature, scale, BLOCK, IS_DIVIDED)
    target = top_p * total

    # tokens below this weigh less than 1 − top_p together, whatever their number
    floor = top + (least + tl.log2(total.to(tl.float32))) / scale
    low = _ordered(floor, UNUSED).to(tl.int64) - 1  # the edge is above this
    high = _ordered(top, UNUSED).to(tl.int64)  # and not above this
    above_low = total
    above_high = target * 0
    passes = 0
    while high - low > 1:
        if (passes < 3) | (passes % 2 == 1):
            lowest, highest = _value((low + 1).to(tl.int32), UNUSED), _value(high.to(tl.int32), UNUSED)
            middle, spread = 0.5, 0.25
            if passes > 0:  # where the edge would lie if mass were even between the bounds
                middle = ((above_low - target) / (above_low - above_high)).to(tl.float32)
                spread = tl.where(passes == 1, 0.125, tl.where(passes == 2, 0.0625, 0.25))
            guess = lowest + (highest - lowest) * middle
            aside = (highest - lowest) * spread
            key_1 = _ordered(guess - aside, UNUSED).to(tl.int64)
            key_2 = _ordered(guess, UNUSED).to(tl.int64)
            key_3 = _ordered(guess + aside, UNUSED).to(tl.int64)
        else:
            part = (high - low + 3) // 4
            key_1, key_2, key_3 = low + part, low + part * 2, low + part * 3
        key_1 = tl.minimum(tl.maximum(key_1, low + 1), high - 1)
        key_2 = tl.minimum(tl.maximum(key_2, low + 1), high - 1)
        key_3 = tl.minimum(tl.maximum(key_3, low + 1), high - 1)
        above_1, above_2, above_3 = _masses_above(
            start,
            width,
            temperature,
            scale,
            top,
            _value(key_1.to(tl.int32), UNUSED),
            _value(key_2.to(tl.int32), UNUSED),
            _value(key_3.to(tl.int32), UNUSED),
            BLOCK,
            IS_DIVIDED,
        )
        # the first cut above which too little lies is the new upper bound, the one before it the lower
        if above_1 < target:
            high, above_high = key_1, above_1
        elif above_2 < target:
            low, above_low, high, above_high = key_1, above_1, key_2, above_2
        elif above_3 < target:
            low, above_low, high, above_high = key_2, above_2, key_3, above_3
        else:
            low, above_low = key_3, above_3
        passes += 1

    value = _value(high.to(tl.int32), UNUSED)
    wanted = tl.ceil(((target - above_high) / tl.exp2((value - top) * scale)).to(tl.float32))
    wanted = tl.minimum(tl.maximum(wanted, 1.0), 1.0 * width).to(tl.int32)  # tokens with that value that are kept
    edge = wanted * 0
    before = wanted * 0
    for first in range(0, width, BLOCK):
        if before < wanted:
            x = _widened(_read(start, first + columns, width), temperature, IS_DIVIDED)
            equal = (x == value) & (first + columns < width)
            count = tl.sum(equal.to(tl.int32), axis=0)
            if count > 0:
                rank = before + tl.cumsum(equal.to(tl.int32), axis=0)
                edge = tl.maximum(edge, tl.max(tl.where(equal & (rank <= wanted), first + columns, 0), axis=0))
            before += count
    tl.store(edges + row, edge.to(tl.int64))


@on_own_device
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
            math.log2(math.e) / (1.0 if divided else temperature),
            float(top_p),
            math.log2((1 - top_p) / logits.shape[1]) - 1e-3,  # less what rounding may take
            BLOCK=_BLOCK,
            UNUSED=_UNUSED_BITS[logits.dtype],
            IS_DIVIDED=divided,
            num_warps=_WARPS,
        )
    return edges
