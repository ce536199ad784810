"""The edge of a top-p nucleus without sorting tokens, equal to what sorting them gives.

Every nucleus is an initial stretch of the order "higher logit first, lower id first among equals", so its last token,
the *edge*, says it all. Its logit is found from the highest values alone or, for flat rows, from sorted values without
their ids, which is many times faster. Where the running mass comes so close to top_p that rounding could decide, the
row is left to the full sort.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MIN_VOCABULARY = 2048
"""Below this many tokens the full sort is as fast."""

_CPU_ROWS, _DEVICE_ROWS = 16, 512

_HIGHEST = 256
# Rounding of a mass as the full sort computes it, several times what was seen: absolute, and relative to 1 − top_p.
_CPU_DOUBT, _DEVICE_DOUBT = (4e-7, 2e-6), (1e-6, 2e-5)


def top_p_edges(
    scaled: Float[Tensor, "rows d_vocab"], top_p: float
) -> tuple[Int[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """Last token of each row's top-p set, and whether it is certain despite rounding.

    Args:
        scaled: float32 logits divided by the temperature.
        top_p: in (0, 1).

    Returns:
        Token ids, and False for rows that need the full sort.
    """
    top = scaled.amax(dim=-1, keepdim=True)
    total = torch.sub(scaled, top).exp_().sum(dim=-1, keepdim=True)
    edges, sure, reached = _edges(scaled, _highest_values(scaled, _HIGHEST), top, total, top_p)
    for part in (~reached).nonzero()[:, 0].split(rows_at_once(scaled)):
        if not len(part):
            break
        rows = scaled[part]
        found = _edges(rows, _highest_values(rows, rows.shape[-1]), top[part], total[part], top_p)
        edges, sure = edges.index_copy(0, part, found[0]), sure.index_copy(0, part, found[1])
    return edges, sure


def rows_at_once(scaled: Tensor) -> int:
    """How many whole rows to sort at once: few on a CPU, to take little memory; many where launches cost more."""
    return _CPU_ROWS if scaled.device.type == "cpu" else _DEVICE_ROWS


def _edges(scaled: Tensor, values: Tensor, top: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """The edge from a row's highest values in descending order; whether it is beyond doubt; whether they reach it."""
    mass = (values - top).exp_()
    from_here_down = 1 - (mass.cumsum(dim=-1, dtype=torch.float64) - mass) / total
    count = (from_here_down > 1 - top_p).sum(dim=-1)
    absolute, relative = _CPU_DOUBT if scaled.device.type == "cpu" else _DEVICE_DOUBT
    distance = (from_here_down - (1 - top_p)).abs().amin(dim=-1)
    sure = (distance > absolute + relative * (1 - top_p)) & (count >= 1)
    reached = count < values.shape[-1]
    cut = values.gather(-1, (count - 1).clamp_min(0)[:, None])
    return _lowest_ids(scaled, cut, count - (values > cut).sum(dim=-1)), sure & reached, reached


def _lowest_ids(scaled: Tensor, cut: Tensor, wanted: Tensor) -> Tensor:
    """The last token that is kept of those with the edge's logit, of which `wanted` are kept, the lower ids first."""
    equal = scaled == cut
    edge = equal.to(torch.uint8).argmax(dim=-1)
    several = (wanted > 1).nonzero()[:, 0]
    if not len(several):
        return edge
    crowd = equal[several]
    reached = crowd & (crowd.cumsum(dim=-1) == wanted[several, None])
    return edge.index_copy(0, several, reached.to(torch.uint8).argmax(dim=-1))


def _highest_values(scaled: Tensor, size: int) -> Tensor:
    """The highest values of each row in descending order, without their ids."""
    size = min(size, scaled.shape[-1])
    if scaled.device.type != "cpu":
        whole = size == scaled.shape[-1]
        return (scaled.sort(dim=-1, descending=True) if whole else scaled.topk(size, dim=-1)).values
    values = scaled.numpy()  # whose sorts of plain values are vectorised
    if size < values.shape[-1]:
        values = np.partition(values, -size, axis=-1)[:, -size:]
    return torch.from_numpy(np.ascontiguousarray(np.sort(values, axis=-1)[:, ::-1]))
