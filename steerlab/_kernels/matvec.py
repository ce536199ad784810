"""Linear maps of one row, or very few, on a GPU: each program holds the whole weights of some outputs in registers.

They are read before the rows are there, while the kernel before still runs: what reads the rows of one map is most of
what the next one needs. That is right as long as no kernel that is under way writes a weight, as in a recorded pass.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from steerlab._kernels.overlap import overlapping, wait_for_previous

MATVEC_ROWS, MATVEC_OUTPUTS, MOST_WEIGHTS = 2, 16, 3
"""Rows at most: with 4, tensor cores are faster on an H200. Outputs of a program at most: divides those of any map."""

_TILE, _WARPS = 32 << 10, 4
"""Bytes of weights of a program, and the warps that hold them; half is as fast on an H200, twice as much is not."""


@triton.jit
def of_output(first, weight_1, weight_2, weight_3, bias_1, bias_2, bias_3, first_2, first_3):
    """The weight and bias of an output of several maps side by side, and which output of that map it is."""
    weight = weight_1
    bias = bias_1
    place = first
    if first >= first_3:
        weight = weight_3
        bias = bias_3
        place = first - first_3
    elif first >= first_2:
        weight = weight_2
        bias = bias_2
        place = first - first_2
    return weight, bias, place


@triton.jit
def _matvec(
    rows,
    out,
    weight_1,
    weight_2,
    weight_3,
    bias_1,
    bias_2,
    bias_3,
    first_2,
    first_3,
    n_rows,
    depth,
    width,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Some outputs, all of one weight."""
    first = tl.program_id(0) * WIDTH
    weight, bias, place = of_output(first, weight_1, weight_2, weight_3, bias_1, bias_2, bias_3, first_2, first_3)
    column = tl.arange(0, WIDTH)
    inner = tl.arange(0, DEPTH)
    inside = inner < depth
    block = tl.load(weight + (place + column)[:, None].to(tl.int64) * depth + inner[None, :], inside[None, :], 0.0)
    wait_for_previous(OVERLAPS)
    for row in range(n_rows):
        x = tl.load(rows + row * depth + inner, inside, 0.0)
        total = tl.sum(block.to(tl.float32) * x[None, :].to(tl.float32), axis=1)
        if HAS_BIAS:
            total += tl.load(bias + place + column).to(tl.float32)
        tl.store(out + row * width + first + column, total.to(out.dtype.element_ty))


def matvec(rows: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """What maps give for rows [n, d_in], side by side: [n, outputs of all]; `biases` of all weights or of none."""
    out, parts = divided(rows, weights, biases)
    size, inner, warps = tile(rows.shape[1])
    _matvec[(out.shape[1] // size,)](
        rows,
        out,
        *parts,
        len(rows),
        rows.shape[1],
        out.shape[1],
        HAS_BIAS=bool(biases),
        WIDTH=size,
        DEPTH=inner,
        num_warps=warps,
        **overlapping(rows.device),
    )
    return out


def divided(rows: Tensor, weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, list[object]]:
    """Room for the outputs of maps, and what tells a kernel which weight and bias each of them has."""
    sizes = [len(weight) for weight in weights]
    starts = [sum(sizes[:k]) for k in (1, 2)]  # that of a weight that is not there is the end
    filled = [
        [*given, *[otherwise] * (MOST_WEIGHTS - len(given))]
        for given, otherwise in ((weights, weights[0]), (biases, rows))
    ]
    return rows.new_empty(len(rows), sum(sizes)), [*filled[0], *filled[1], *starts]


def tile(depth: int) -> tuple[int, int, int]:
    """How many outputs a program has, the power of two that their inputs fit in, and its warps."""
    inner = triton.next_power_of_2(depth)
    n_bytes = 2 * inner
    return max(1, min(MATVEC_OUTPUTS, _TILE // n_bytes)), inner, _WARPS * max(1, n_bytes // _TILE)
