"""Sums over a row of logits, and the gradient of the measurements made of them, on a GPU in two passes each.

The formulas of `measures.steps`, float32 throughout; a program per row. What eager operations would write out and read
again a dozen times, a chunk of logits in size, stays in registers here.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK = 2048

# No argument may be called `params`: Triton's generated launcher has a variable of that name.


@triton.jit
def _highest(start, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, width, BLOCK):
        highest = tl.maximum(highest, tl.load(start + first + columns, first + columns < width, float("-inf")))
    return tl.max(highest, axis=0)


@triton.jit
def _weights(x, a, ids, highest, cut, edge, inverse, HAS_EDGE: tl.constexpr):
    """Of some tokens of a row: z = (x − max)/T, exp z, and which are in the nucleus."""
    z = tl.maximum((x - highest) * inverse, -1e4)  # an exponent whose exponential is 0, and which times 0 is 0
    inside = ids >= 0
    if HAS_EDGE:
        inside = (a > cut) | ((a == cut) & (ids <= edge))
    return z, tl.exp(z), inside


@triton.jit
def _row_sums(start, scaled_start, width, cut, edge, inverse, BLOCK: tl.constexpr, HAS_EDGE: tl.constexpr):
    """The highest logit; Σ exp(x − max); Σ exp z and Σ z·exp z over the nucleus."""
    columns = tl.arange(0, BLOCK)
    highest = _highest(start, width, BLOCK)
    whole = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        ids = first + columns
        x = tl.load(start + ids, ids < width, float("-inf"))
        a = tl.load(scaled_start + ids, ids < width, float("-inf"))
        z, w, inside = _weights(x, a, ids, highest, cut, edge, inverse, HAS_EDGE)
        whole += tl.exp(tl.maximum(x - highest, -1e4))
        w = tl.where(inside & (ids < width), w, 0.0)
        mass += w
        moment += w * z
    return highest, tl.sum(whole, axis=0), tl.sum(mass, axis=0), tl.sum(moment, axis=0)


@triton.jit
def _sums_kernel(
    logits, scaled, edges, sums, stride, scaled_stride, width, inverse, BLOCK: tl.constexpr, HAS_EDGE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scaled_start = scaled + row * scaled_stride
    edge = tl.load(edges + row) if HAS_EDGE else 0
    cut = tl.load(scaled_start + edge) if HAS_EDGE else 0.0
    found = _row_sums(logits + row * stride, scaled_start, width, cut, edge, inverse, BLOCK, HAS_EDGE)
    tl.store(sums + row * 4, found[0])
    tl.store(sums + row * 4 + 1, found[1])
    tl.store(sums + row * 4 + 2, found[2])
    tl.store(sums + row * 4 + 3, found[3])


@triton.jit
def _gradient_kernel(
    logits,
    scaled,
    edges,
    tokens,
    by,
    gradient,
    stride,
    scaled_stride,
    width,
    inverse,
    BLOCK: tl.constexpr,
    HAS_EDGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, scaled_start = logits + row * stride, scaled + row * scaled_stride
    edge = tl.load(edges + row) if HAS_EDGE else 0
    cut = tl.load(scaled_start + edge) if HAS_EDGE else 0.0
    found = _row_sums(start, scaled_start, width, cut, edge, inverse, BLOCK, HAS_EDGE)
    highest, whole, mass = found[0], found[1], found[2]
    mean = found[3] / mass
    token = tl.load(tokens + row)
    by_p = tl.load(by + row * 3)
    by_q = tl.load(by + row * 3 + 1) * inverse
    by_h = tl.load(by + row * 3 + 2) * inverse
    if HAS_EDGE:
        at_token = tl.load(scaled_start + token)
        by_q = tl.where((at_token > cut) | ((at_token == cut) & (token <= edge)), by_q, 0.0)
    columns = tl.arange(0, BLOCK)
    for first in range(0, width, BLOCK):
        ids = first + columns
        x = tl.load(start + ids, ids < width, float("-inf"))
        a = tl.load(scaled_start + ids, ids < width, float("-inf"))
        z, w, inside = _weights(x, a, ids, highest, cut, edge, inverse, HAS_EDGE)
        q = tl.where(inside, w / mass, 0.0)
        p = tl.exp(tl.maximum(x - highest, -1e4)) / whole
        value = -by_q * q - by_h * q * (z - mean) - by_p * p  # log q + H = z − E_q[z]
        value += tl.where(ids == token, by_q + by_p, 0.0)
        tl.store(gradient + row * width + ids, value, ids < width)


def row_sums_on_gpu(
    logits: Float[Tensor, "rows d_vocab"],
    scaled: Float[Tensor, "rows d_vocab"],
    edges: Int[Tensor, " rows"] | None,
    temperature: float,
) -> Float[Tensor, "rows 4"]:
    """Of each row the highest logit m, Σ exp(x − m), and over the nucleus Σ exp z and Σ z·exp z with z = (x − m)/T.

    Args:
        logits: float32 on a GPU, the columns of a row next to each other.
        scaled: logits / temperature, as the nucleus was chosen on.
        edges: its last tokens; None for a policy that keeps every token.
        temperature: T.
    """
    sums = torch.empty((len(logits), 4), dtype=torch.float32, device=logits.device)
    if len(logits):
        _sums_kernel[(len(logits),)](
            logits,
            scaled,
            logits if edges is None else edges,
            sums,
            logits.stride(0),
            scaled.stride(0),
            logits.shape[1],
            1 / temperature,
            BLOCK=_BLOCK,
            HAS_EDGE=edges is not None,
            num_warps=8,
        )
    return sums


def gradient_on_gpu(
    logits: Float[Tensor, "rows d_vocab"],
    scaled: Float[Tensor, "rows d_vocab"],
    edges: Int[Tensor, " rows"] | None,
    temperature: float,
    tokens: Int[Tensor, " rows"],
    by: Float[Tensor, "rows 3"],
) -> Float[Tensor, "rows d_vocab"]:
    """Gradient by the logits of Σ (g₁·log p + g₂·log q + g₃·H), the nucleus held fixed; see `policy_steps_gradient`.

    Args:
        logits: as in `row_sums_on_gpu`.
        scaled: as there.
        edges: as there.
        temperature: as there.
        tokens: the token of each row.
        by: g₁, g₂, g₃ of each row.
    """
    gradient = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        _gradient_kernel[(len(logits),)](
            logits,
            scaled,
            logits if edges is None else edges,
            tokens,
            by,
            gradient,
            logits.stride(0),
            scaled.stride(0),
            logits.shape[1],
            1 / temperature,
            BLOCK=_BLOCK,
            HAS_EDGE=edges is not None,
            num_warps=8,
        )
    return gradient
