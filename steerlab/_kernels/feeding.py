"""What a step of a program takes, stated in one kernel on a GPU."""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.availability import on_own_device

_WARPS = 1


@triton.jit(do_not_specialize=["step", "ran"])
def _feed(fed, tokens, index, counts, filled, step, ran):
    """One row: its token, which of its tokens that is, and how many it has run; the first counts for the cache too."""
    row = tl.program_id(0)
    token = tl.load(fed + row)
    tl.store(tokens + row, tl.maximum(token, 0))
    tl.store(index + row, tl.where(token < 0, -1, step).to(tl.int64))
    tl.store(counts + row, tl.load(counts + row) + ran)
    if row == 0:
        tl.store(filled, tl.load(filled) + ran)


@on_own_device
def feed(fed: Tensor, tokens: Tensor, index: Tensor, counts: Tensor, filled: Tensor, step: int, ran: int) -> None:
    """Writes a step's inputs.

    Args:
        fed: the token of each row, negative for a row that has ended, [rows].
        tokens: where it goes, 0 in the place of a negative one, [rows, 1].
        index: where the step goes, -1 for such rows, [rows, 1].
        counts: to which `ran` is added, [rows, 1].
        filled: likewise, [].
        step: the number of the step.
        ran: tokens that ran since the last call.
    """
    _feed[(len(fed),)](fed, tokens, index, counts, filled, step, ran, num_warps=_WARPS)
