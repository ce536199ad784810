"""What is measured of rows of logits on a GPU, and its gradient: each in one pass over the row.

The formulas of `measures.steps` in float32, whatever the logits' dtype. What eager operations would write out and read
again a dozen times, a chunk of logits in size, stays in registers here.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from steerlab._kernels.availability import on_own_device

_BLOCK, _DEPTH, _WARPS = 1024, 4, 4
_GRADIENT_BLOCK, _GRADIENT_WARPS = 2048, 4

# No argument may be called `params`: Triton's generated launcher has a variable of that name.


@triton.jit
def _is_inside(x, ids, cut, edge, temperature, IS_DIVIDED: tl.constexpr):
    """Which tokens come no later than the edge."""
    a = tl.math.div_rn(x, temperature) if IS_DIVIDED else x
    return (a > cut) | ((a == cut) & (ids <= edge))


@triton.jit
def _measures_kernel(
    logits,
    tokens,
    edges,
    found,
    cuts,
    stride,
    found_stride,
    width,
    temperature,
    inverse,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    IS_WARM: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    edge = tl.load(edges + row) if HAS_EDGE else 0
    cut = 0.0
    if HAS_EDGE:
        cut = tl.load(start + edge).to(tl.float32)
        cut = tl.math.div_rn(cut, temperature) if IS_DIVIDED else cut
        tl.store(cuts + row, cut)
    # each lane sums relative to the highest logit that it has seen; DEPTH values move it once
    columns = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    lane = tl.full([BLOCK], -1e30, tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)  # with z in units of log 2, as all of the loop
    bits = inverse * 1.4426950408889634
    for first in range(0, width, DEPTH * BLOCK):
        ids = first + columns
        x = tl.load(start + ids, ids < width, float("-inf")).to(tl.float32)
        higher = tl.maximum(lane, tl.max(x, axis=0))
        moved = tl.maximum((lane - higher) * bits, -1e30)
        z = tl.maximum((x - higher[None, :]) * bits, -1e4)  # an exponent whose power of 2 is 0
        w = tl.exp2(z)
        shrunk = tl.exp2(moved)
        if IS_WARM | HAS_EDGE:
            w_model = tl.exp(x - higher[None, :]) if IS_WARM else w
            whole = whole * (tl.exp(lane - higher) if IS_WARM else shrunk) + tl.sum(w_model, axis=0)
        if HAS_EDGE:
            w = tl.where(_is_inside(x, ids, cut, edge, temperature, IS_DIVIDED), w, 0.0)
        moment = (moment + mass * moved) * shrunk + tl.sum(w * z, axis=0)
        mass = mass * shrunk + tl.sum(w, axis=0)
        lane = higher
    moment *= 0.6931471805599453
    highest = tl.max(lane, axis=0)
    moved = tl.maximum((lane - highest) * inverse, -1e30)
    shrunk = tl.exp(moved)
    moment = tl.sum((moment + mass * moved) * shrunk, axis=0)
    total = tl.sum(mass * shrunk, axis=0)
    log_mass = tl.log(total)
    log_whole = log_mass
    if IS_WARM | HAS_EDGE:
        log_whole = tl.log(tl.sum(whole * (tl.exp(lane - highest) if IS_WARM else shrunk), axis=0))
    mean = moment / total
    token = tl.load(tokens + row)
    own = tl.load(start + token).to(tl.float32)
    log_q = (own - highest) * inverse - log_mass
    if HAS_EDGE:
        log_q = tl.where(_is_inside(own, token, cut, edge, temperature, IS_DIVIDED), log_q, float("-inf"))
    tl.store(found + row, own - highest - log_whole)
    tl.store(found + found_stride + row, log_q)
    tl.store(found + found_stride * 2 + row, tl.maximum(log_mass - mean, 0.0))
    tl.store(found + found_stride * 3 + row, highest)
    tl.store(found + found_stride * 4 + row, log_whole)
    tl.store(found + found_stride * 5 + row, log_mass)
    tl.store(found + found_stride * 6 + row, mean)


@triton.jit
def _gradient_kernel(
    logits,
    tokens,
    edges,
    found,
    cuts,
    by_log_p,
    by_log_q,
    by_entropy,
    stride,
    found_stride,
    width,
    first_id,
    temperature,
    inverse,
    factor,
    softcap,
    BLOCK: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    HAS_LOG_P: tl.constexpr,
    HAS_LOG_Q: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = logits + row * stride + columns
    x = tl.load(places, columns < width, float("-inf")).to(tl.float32)
    ids = columns + first_id
    token = tl.load(tokens + row)
    edge = tl.load(edges + row) if HAS_EDGE else 0
    cut = tl.load(cuts + row) if HAS_EDGE else 0.0
    is_token = ids == token
    below = x - tl.load(found + found_stride * 3 + row)
    value = tl.zeros([BLOCK], tl.float32)
    if HAS_LOG_Q | HAS_ENTROPY:
        z = tl.maximum(below * inverse, -1e4)
        q = tl.exp(z - tl.load(found + found_stride * 5 + row))
        if HAS_EDGE:
            q = tl.where(_is_inside(x, ids, cut, edge, temperature, IS_DIVIDED), q, 0.0)
        if HAS_LOG_Q:
            g = tl.load(by_log_q + row)
            if HAS_EDGE:  # a token outside has log q = −inf and no gradient
                g = tl.where(tl.load(found + found_stride + row) == float("-inf"), 0.0, g)
            value += g * inverse * (tl.where(is_token, 1.0, 0.0) - q)
        if HAS_ENTROPY:
            g = tl.load(by_entropy + row)
            value -= g * inverse * q * (z - tl.load(found + found_stride * 6 + row))  # log q + H = z − E_q[z]
    if HAS_LOG_P:
        p = tl.exp(tl.maximum(below, -1e4) - tl.load(found + found_stride * 4 + row))
        value += tl.load(by_log_p + row) * (tl.where(is_token, 1.0, 0.0) - p)
    if HAS_SOFTCAP:
        value *= 1.0 - (x / softcap) * (x / softcap)
    tl.store(places, (value * factor).to(logits.dtype.element_ty), columns < width)


@dataclass(frozen=True)
class RowMeasures:
    """What was measured of rows, and what their gradient needs.

    Attributes:
        found: log p, log q and entropy of each row; the highest logit m, log Σ exp(x − m), and over the nucleus
            log Σ exp z and E_q[z], with z = (x − m)/T.
        edges: the nucleus's last tokens; None if every token is kept.
        cuts: their value, by which tokens are ordered.
    """

    found: Float[Tensor, "7 rows"]
    edges: Int[Tensor, " rows"] | None
    cuts: Float[Tensor, " rows"] | None

    @classmethod
    def empty(cls, n_rows: int, edges: Tensor | None, device: torch.device) -> "RowMeasures":
        """Room for rows whose nuclei are known."""
        found = torch.empty((7, n_rows), dtype=torch.float32, device=device)
        return cls(found, edges, None if edges is None else torch.empty(n_rows, dtype=torch.float32, device=device))

    def __getitem__(self, part: slice) -> "RowMeasures":
        """Some of the rows, in the same memory."""
        edges, cuts = (None if values is None else values[part] for values in (self.edges, self.cuts))
        return RowMeasures(self.found[:, part], edges, cuts)

    @property
    def log_probs(self) -> Float[Tensor, " rows"]:
        """Log p of each row's token."""
        return self.found[0]

    @property
    def log_qs(self) -> Float[Tensor, " rows"]:
        """Log q of it; −inf outside the nucleus."""
        return self.found[1]

    @property
    def entropies(self) -> Float[Tensor, " rows"]:
        """The entropy of q."""
        return self.found[2]


def _is_divided(logits: Tensor, temperature: float) -> bool:
    """Whether tokens are ordered by logit / T: that can make neighbours in float32 equal, never in a narrower dtype."""
    return temperature != 1 and logits.dtype == torch.float32


@on_own_device
def measure_rows_on_gpu(
    logits: Float[Tensor, "rows d_vocab"], tokens: Int[Tensor, " rows"], temperature: float, into: RowMeasures
) -> None:
    """Log p, log q and the entropy of each row.

    Args:
        logits: float32, bfloat16 or float16, on a GPU, the columns of a row next to each other.
        tokens: the token of each row.
        temperature: T.
        into: takes the measures; its `edges` are given.
    """
    if not len(logits):
        return
    has_edge = into.edges is not None
    _measures_kernel[(len(logits),)](
        logits,
        tokens,
        into.edges if has_edge else tokens,
        into.found,
        into.cuts if has_edge else into.found,
        logits.stride(0),
        into.found.stride(0),
        logits.shape[1],
        float(temperature),
        1 / temperature,
        BLOCK=_BLOCK,
        DEPTH=_DEPTH,
        HAS_EDGE=has_edge,
        IS_WARM=temperature != 1,
        IS_DIVIDED=_is_divided(logits, temperature),
        num_warps=_WARPS,
    )


@on_own_device
def gradient_in_place_on_gpu(
    logits: Float[Tensor, "rows columns"],
    tokens: Int[Tensor, " rows"],
    temperature: float,
    measured: RowMeasures,
    by: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    first_id: int = 0,
    factor: float = 1.0,
    softcap: float | None = None,
) -> None:
    """Replaces logits by the gradient of Σ (g₁·log p + g₂·log q + g₃·H) by what the head gave, the nucleus held fixed.

    Args:
        logits: some columns of the rows that were measured; overwritten, rounded to their dtype once.
        tokens: the token of each row.
        temperature: T.
        measured: of those rows.
        by: g₁, g₂, g₃ of each row, float32 without gaps; None means 0.
        first_id: the token of the first column.
        factor: of the head's output in the logits.
        softcap: c, where logits are c·tanh(x / c); None without.
    """
    if not logits.numel():
        return
    has_edge = measured.edges is not None
    given = [cast(Tensor, measured.found) if g is None else g for g in by]
    _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], _GRADIENT_BLOCK))](
        logits,
        tokens,
        measured.edges if has_edge else tokens,
        measured.found,
        measured.cuts if has_edge else measured.found,
        *given,
        logits.stride(0),
        measured.found.stride(0),
        logits.shape[1],
        first_id,
        float(temperature),
        1 / temperature,
        float(factor),
        1.0 if softcap is None else float(softcap),
        BLOCK=_GRADIENT_BLOCK,
        HAS_EDGE=has_edge,
        IS_DIVIDED=_is_divided(logits, temperature),
        HAS_LOG_P=by[0] is not None,
        HAS_LOG_Q=by[1] is not None,
        HAS_ENTROPY=by[2] is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=_GRADIENT_WARPS,
    )
