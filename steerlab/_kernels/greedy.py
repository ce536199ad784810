"""The most probable token of each row of logits on a GPU, with its log-probability, and which rows that ends."""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab._kernels.availability import on_own_device

_BLOCK, _WARPS, _JOIN_WARPS = 4096, 8, 1


@triton.jit
def _parts(logits, tops, places, masses, stride, width, BLOCK: tl.constexpr):
    """The highest of a stretch of columns, where it is, and Σ exp(what the others lie below it); NaN counts as ∞."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + columns, columns < width, float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x, axis=0)
    place = tl.program_id(1) * BLOCK + tl.argmax(x, axis=0)
    below = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))
    target = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + target, top)
    tl.store(places + target, place)
    tl.store(masses + target, tl.sum(below, axis=0))


@triton.jit
def _joined(tops, places, masses, tokens, log_probs, broken, n_parts, PARTS: tl.constexpr):
    """The same of a whole row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    there = part < n_parts
    top = tl.load(tops + row * n_parts + part, there, float("-inf"))
    highest = tl.max(top, axis=0)
    mass = tl.load(masses + row * n_parts + part, there, 0.0)
    total = tl.sum(tl.where(top == float("-inf"), 0.0, mass * tl.exp(top - highest)), axis=0)
    tl.store(tokens + row, tl.load(places + row * n_parts + tl.argmax(top, axis=0)).to(tl.int64))
    tl.store(log_probs + row, -tl.log(total))
    tl.store(broken + row, tl.abs(highest) == float("inf"))


@triton.jit
def _settle(tokens, broken, ended, failed, eos, given, fed, n_eos, EOS: tl.constexpr):
    """One row: its token and what the next pass takes, -1 where it has ended before and, for the pass, after this."""
    row = tl.program_id(0)
    is_over, is_broken = tl.load(ended + row) != 0, tl.load(broken + row) != 0
    if is_broken & (is_over == 0):
        tl.store(failed + row, is_broken)
    is_over = is_over | is_broken
    token = tl.where(is_over, -1, tl.load(tokens + row))
    tl.store(given + row, token)
    place = tl.arange(0, EOS)
    is_last = tl.max((tl.load(eos + place, place < n_eos, -2) == token).to(tl.int32), axis=0) != 0
    tl.store(ended + row, is_over | is_last)
    tl.store(fed + row, tl.where(is_last, -1, token))


@on_own_device
def most_probable(
    logits: Float[Tensor, "rows d_vocab"],
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """The highest logit's token of each row, the first of several, and its log-probability in nats.

    Returns:
        Tokens, log-probabilities, and whether the highest logit is not finite; if so, the others mean nothing.
    """
    n_rows, width = logits.shape
    n_parts = triton.cdiv(width, _BLOCK)
    tops, masses = logits.new_empty(2, n_rows, n_parts, dtype=torch.float32)
    places = logits.new_empty(n_rows, n_parts, dtype=torch.int32)
    _parts[(n_rows, n_parts)](logits, tops, places, masses, logits.stride(0), width, BLOCK=_BLOCK, num_warps=_WARPS)
    tokens = logits.new_empty(n_rows, dtype=torch.long)
    log_probs = logits.new_empty(n_rows, dtype=torch.float32)
    broken = logits.new_empty(n_rows, dtype=torch.bool)
    _joined[(n_rows,)](
        tops,
        places,
        masses,
        tokens,
        log_probs,
        broken,
        n_parts,
        PARTS=triton.next_power_of_2(n_parts),
        num_warps=_JOIN_WARPS,
    )
    return tokens, log_probs, broken


@on_own_device
def settle(
    tokens: Int[Tensor, " rows"],
    broken: Bool[Tensor, " rows"],
    ended: Bool[Tensor, " rows"],
    failed: Bool[Tensor, " rows"],
    eos: Int[Tensor, " ids"],
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Tokens of rows that go on, and what the next pass takes: -1 for rows that have ended.

    Args:
        tokens: drawn in each row.
        broken: rows whose logits are not finite, which end without a token.
        ended: rows that have ended; these and those that end now, in place.
        failed: rows that ended so; likewise.
        eos: tokens that end a row.
    """
    given, fed = torch.empty_like(tokens), torch.empty_like(tokens)
    block = triton.next_power_of_2(max(1, len(eos)))
    _settle[(len(tokens),)](tokens, broken, ended, failed, eos, given, fed, len(eos), EOS=block, num_warps=_JOIN_WARPS)
    return given, fed
