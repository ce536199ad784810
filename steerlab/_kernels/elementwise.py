"""What lies between the linear maps of a layer, for a few rows on a GPU, each in one kernel instead of several.

Roundings are those of Hugging Face's modules: what they store between two steps is rounded here too.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.availability import on_own_device, runs_kernels
from steerlab._kernels.overlap import overlapping, wait_for_previous

_WIDEST, _BLOCK = 16384, 1024
_NORM_WARPS, _GATE_WARPS, _WRITE_WARPS = 8, 4, 1


@triton.jit
def _norm(
    rows, added, weight, total, out, stride, added_row, width, eps, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row, or the sum of two, over its root mean square, times a weight."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    inside = inner < width
    stored = tl.load(rows + row * stride + inner, inside, 0.0)
    x = stored.to(tl.float32)
    if HAS_ADDED:
        stored = (x + tl.load(added + row * added_row + inner, inside, 0.0).to(tl.float32)).to(stored.dtype)
        tl.store(total + row * width + inner, stored, inside)
        x = stored.to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)).to(stored.dtype)
    w = tl.load(weight + inner, inside, 0.0)
    tl.store(out + row * width + inner, (w.to(tl.float32) * scaled.to(tl.float32)).to(stored.dtype), inside)


@triton.jit
def _gate(gate, value, out, gate_row, value_row, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """A stretch of silu(gate) · value."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = inner < width
    stored = tl.load(gate + row * gate_row + inner, inside, 0.0)
    x = stored.to(tl.float32)
    opened = (x / (1.0 + tl.exp(-x))).to(stored.dtype).to(tl.float32)
    y = tl.load(value + row * value_row + inner, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + inner, (opened * y).to(stored.dtype), inside)


@triton.jit
def _write(
    key, value, keys, values, slot, key_row, key_head, value_row, value_head, n_slots, n_heads, d_key, d_value,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One head's new key and value of one row, into the slot of its cache."""
    wait_for_previous(OVERLAPS)
    row = (tl.program_id(0) // n_heads).to(tl.int64)
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    place = (row * n_heads + head) * n_slots + tl.load(slot)
    inner = tl.arange(0, BLOCK)
    new = tl.load(key + row * key_row + head * key_head + inner, inner < d_key)
    tl.store(keys + place * d_key + inner, new, inner < d_key)
    new = tl.load(value + row * value_row + head * value_head + inner, inner < d_value)
    tl.store(values + place * d_value + inner, new, inner < d_value)


def can_normalise(rows: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these rows [..., width]."""
    is_known = rows.dtype == weight.dtype and rows.dtype != torch.float64
    return is_known and runs_kernels(rows) and rows.shape[-1] == weight.numel() <= _WIDEST


@torch.library.custom_op("steerlab::rms_norm", mutates_args=())
@on_own_device
def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [..., width] over their root mean square, times a weight [width]."""
    flat = rows.reshape(-1, rows.shape[-1])
    out = torch.empty_like(flat)
    block = triton.next_power_of_2(flat.shape[1])
    strides = flat.stride(0), flat.stride(0)
    _norm[(len(flat),)](
        flat,
        flat,
        weight,
        out,
        out,
        *strides,
        flat.shape[1],
        eps,
        HAS_ADDED=False,
        BLOCK=block,
        num_warps=_NORM_WARPS,
        **overlapping(flat.device),
    )
    return out.view(rows.shape)


@rms_norm.register_fake
def _(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rows.new_empty(rows.shape)


def can_add(rows: Tensor, added: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these rows and what is added to them, both [..., width]."""
    is_one_kind = rows.dtype == added.dtype and rows.device == added.device == weight.device
    return is_one_kind and rows.shape == added.shape and can_normalise(rows, weight) and runs_kernels(added)


@torch.library.custom_op("steerlab::add_and_norm", mutates_args=())
@on_own_device
def add_and_norm(rows: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of rows [..., width], and that over its root mean square, times a weight [width]."""
    flat, others = (x.reshape(-1, x.shape[-1]) for x in (rows, added))
    total, out = (flat.new_empty(flat.shape) for _ in range(2))
    block = triton.next_power_of_2(flat.shape[1])
    strides = flat.stride(0), others.stride(0)
    _norm[(len(flat),)](
        flat,
        others,
        weight,
        total,
        out,
        *strides,
        flat.shape[1],
        eps,
        HAS_ADDED=True,
        BLOCK=block,
        num_warps=_NORM_WARPS,
        **overlapping(flat.device),
    )
    return total.view(rows.shape), out.view(rows.shape)


@add_and_norm.register_fake
def _(rows: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape)


def can_gate(gate: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes these rows [..., width]."""
    return runs_kernels(gate) and runs_kernels(value) and gate.dtype == value.dtype != torch.float64


@torch.library.custom_op("steerlab::silu_gate", mutates_args=())
@on_own_device
def silu_gate(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) · value, both of shape [..., width]."""
    rows, others = (x.reshape(-1, x.shape[-1]) for x in (gate, value))
    out = rows.new_empty(rows.shape)
    _gate[(len(rows), triton.cdiv(rows.shape[1], _BLOCK))](
        rows,
        others,
        out,
        rows.stride(0),
        others.stride(0),
        rows.shape[1],
        BLOCK=_BLOCK,
        num_warps=_GATE_WARPS,
        **overlapping(rows.device),
    )
    return out.view(gate.shape)


@silu_gate.register_fake
def _(gate: Tensor, value: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def can_write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes one new token per row, [rows, heads, 1, width], and caches of contiguous slots."""
    return (
        all(runs_kernels(x) and x.dim() == 4 for x in (key, value, keys, values))
        and key.shape[2] == value.shape[2] == 1
        and key.dtype == value.dtype == keys.dtype == values.dtype
        and keys.is_contiguous()
        and values.is_contiguous()
    )


@torch.library.custom_op("steerlab::write", mutates_args=("keys", "values"))
@on_own_device
def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot: Tensor) -> None:
    """Stores one new token per row in a slot of the cache; `slot` has one element, on the device."""
    n_rows, n_heads, _, d_key = key.shape
    d_value = value.shape[3]
    _write[(n_rows * n_heads,)](
        key,
        value,
        keys,
        values,
        slot,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.shape[2],
        n_heads,
        d_key,
        d_value,
        BLOCK=triton.next_power_of_2(max(d_key, d_value)),
        num_warps=_WRITE_WARPS,
        **overlapping(key.device),
    )
