"""Attention of one new token per row to a cache of fixed size, on a GPU.

The query heads that share a key stand together, so that each key is read once. A long cache is split, and the parts are
joined by the log-sum-exp of their scores.

Source:
    Dao et al. 2023, Flash-Decoding for long-context inference (pytorch.org/blog/flash-decoding).
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.availability import on_own_device, runs_kernels
from steerlab._kernels.overlap import overlapping, wait_for_previous

_LEAST_PART, _PROGRAMS, _JOIN_WARPS = 64, 132, 2
_SHORT, _LONG = (64, 4), (128, 8)
"""Slots that a program looks at together, and its warps: where its part of the cache is one such block, or more."""


@triton.jit
def _attend(
    query,
    keys,
    values,
    mask,
    out,
    tops,
    sums,
    scale,
    n_slots,
    part,
    query_row,
    query_head,
    key_row,
    key_head,
    key_slot,
    value_row,
    value_head,
    value_slot,
    mask_row,
    mask_slot,
    n_keys,
    group,
    d_key,
    d_value,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    D_KEY: tl.constexpr,
    D_VALUE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The query heads of one key head in one row, over one part of the slots."""
    wait_for_previous(OVERLAPS)
    row = (tl.program_id(0) // n_keys).to(tl.int64)
    shared = (tl.program_id(0) % n_keys).to(tl.int64)
    head = tl.arange(0, GROUP)
    slot = tl.arange(0, BLOCK)
    inner = tl.arange(0, D_KEY)
    outer = tl.arange(0, D_VALUE)
    heads = shared * group + head
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + inner[None, :],
        (head < group)[:, None] & (inner < d_key)[None, :],
        0.0,
    )
    top = tl.full([GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, D_VALUE], tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, n_slots)
    for first in range(begin, end, BLOCK):
        place = first + slot
        seen = place < end
        if HAS_MASK:
            seen = seen & (tl.load(mask + row * mask_row + place * mask_slot, seen, 0) != 0)
        k = tl.load(
            keys + row * key_row + shared * key_head + place[None, :].to(tl.int64) * key_slot + inner[:, None],
            (place < end)[None, :] & (inner < d_key)[:, None],
            0.0,
        )
        scores = tl.where(seen[None, :], tl.dot(q, k) * (scale * 1.4426950408889634), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, axis=1)
        v = tl.load(
            values + row * value_row + shared * value_head + place[:, None].to(tl.int64) * value_slot + outer[None, :],
            (place < end)[:, None] & (outer < d_value)[None, :],
            0.0,
        )
        total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None])
        top = higher
    n_heads = n_keys * group
    if IS_WHOLE:
        target = (row * n_heads + heads) * d_value
        found = total / tl.where(mass == 0, 1.0, mass)[:, None]
    else:
        partial = (row * n_heads + heads) * tl.num_programs(1) + tl.program_id(1)
        target = partial * d_value
        found = total
        tl.store(tops + partial, top, head < group)
        tl.store(sums + partial, mass, head < group)
    tl.store(
        out + target[:, None] + outer[None, :],
        found.to(out.dtype.element_ty),
        (head < group)[:, None] & (outer < d_value)[None, :],
    )


@triton.jit
def _join(parts, tops, sums, out, n_parts, d_value, PARTS: tl.constexpr, D_VALUE: tl.constexpr, OVERLAPS: tl.constexpr):
    """One head of one row, over the parts of its slots."""
    wait_for_previous(OVERLAPS)
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    outer = tl.arange(0, D_VALUE)
    there = part < n_parts
    top = tl.load(tops + head * n_parts + part, there, float("-inf"))
    highest = tl.max(top, axis=0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    mass = tl.sum(tl.load(sums + head * n_parts + part, there, 0.0) * weight, axis=0)
    found = tl.load(
        parts + (head * n_parts + part)[:, None] * d_value + outer[None, :],
        there[:, None] & (outer < d_value)[None, :],
        0.0,
    )
    total = tl.sum(found * weight[:, None], axis=0) / tl.where(mass == 0, 1.0, mass)
    tl.store(out + head * d_value + outer, total.to(out.dtype.element_ty), outer < d_value)


def can_attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes these: half precision, one token per row, and a mask that all heads share."""
    tensors = (query, keys, values)
    return (
        all(runs_kernels(tensor) and tensor.dim() == 4 for tensor in tensors)
        and query.dtype == keys.dtype == values.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] == 1
        and query.shape[1] % keys.shape[1] == 0
        and max(query.shape[3], values.shape[3]) <= 256
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1:] == (1, 1, keys.shape[2])))
    )


def _part(n_rows: int, n_keys: int, n_slots: int) -> tuple[int, int, int]:
    """Slots that one program looks at, of which so many at once, and its warps: all slots, unless programs are few."""
    n_parts = max(1, min(-(-n_slots // _LEAST_PART), _PROGRAMS // (n_rows * n_keys)))
    block, warps = _SHORT if -(-n_slots // n_parts) <= _SHORT[0] else _LONG
    return -(-n_slots // (n_parts * block)) * block, block, warps


@torch.library.custom_op("steerlab::attend", mutates_args=())
@on_own_device
def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """What each head reads; a row that sees no slot reads 0.

    Args:
        query: shape [rows, heads, 1, d_key].
        keys: shape [rows, key heads, slots, d_key].
        values: shape [rows, key heads, slots, d_value].
        mask: True where a slot is seen, shape [rows or 1, 1, 1, slots]; None if all are.
        scale: of the scores.

    Returns:
        Shape [rows, 1, heads, d_value].
    """
    n_rows, n_heads, _, d_key = query.shape
    n_keys, n_slots, d_value = keys.shape[1], keys.shape[2], values.shape[3]
    part, block, warps = _part(n_rows, n_keys, n_slots)
    n_parts = -(-n_slots // part)
    out = query.new_empty(n_rows, 1, n_heads, d_value)
    is_whole = n_parts == 1
    parts = out if is_whole else query.new_empty(n_rows, n_heads, n_parts, d_value, dtype=torch.float32)
    tops, sums = (query.new_empty(n_rows, n_heads, n_parts, dtype=torch.float32) for _ in range(2))
    seen = query if mask is None else mask
    _attend[(n_rows * n_keys, n_parts)](
        query,
        keys,
        values,
        seen,
        parts,
        tops,
        sums,
        scale,
        n_slots,
        part,
        query.stride(0),
        query.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        seen.stride(0) if seen.shape[0] > 1 else 0,
        seen.stride(3),
        n_keys,
        n_heads // n_keys,
        d_key,
        d_value,
        GROUP=max(16, triton.next_power_of_2(n_heads // n_keys)),
        BLOCK=block,
        D_KEY=max(16, triton.next_power_of_2(d_key)),
        D_VALUE=max(16, triton.next_power_of_2(d_value)),
        HAS_MASK=mask is not None,
        IS_WHOLE=is_whole,
        num_warps=warps,
        **overlapping(query.device),
    )
    if not is_whole:
        _join[(n_rows * n_heads,)](
            parts,
            tops,
            sums,
            out,
            n_parts,
            d_value,
            PARTS=triton.next_power_of_2(n_parts),
            D_VALUE=max(16, triton.next_power_of_2(d_value)),
            num_warps=_JOIN_WARPS,
            **overlapping(query.device),
        )
    return out


@attend.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], values.shape[3])
