"""The operator in plain torch: what runs on a CPU, and the meaning that the GPU kernel is tested against."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab.engines.vllm.worker.tables import POSITION, READ, SLOT

_TINY = torch.finfo(torch.float32).tiny


def edit_rows(
    hidden: Float[Tensor, "*tokens d_model"],
    residual: Float[Tensor, "*tokens d_model"] | None,
    tokens: Int[Tensor, "capacity 3"],
    counts: Int[Tensor, " slots"],
    runs: Int[Tensor, "slots directions runs 2"],
    units: Float[Tensor, "slots directions d_model"],
    params: Float[Tensor, "slots directions 5"],
    tallies: Float[Tensor, "slots directions 2"],
    readings: Float[Tensor, "reads d_model"],
) -> None:
    """Edits the stream hidden + residual by changing `hidden`, in float32, and reads what is asked for after it.

    Args:
        hidden: the layer's first output; changed in place.
        residual: what the stream consists of beside it; None if `hidden` is the stream.
        tokens: see `Tables`, as the others.
        counts: see `Tables`.
        runs: see `Tables`.
        units: see `Tables`.
        params: see `Tables`.
        tallies: see `Tables`; counted up in place.
        readings: see `Tables`; written in place.
    """
    flat = hidden.view(-1, hidden.shape[-1])
    rest = None if residual is None else residual.reshape(-1, hidden.shape[-1])
    table = tokens[: flat.shape[0]]
    edited = (table[:, SLOT] >= 0).nonzero()[:, 0]
    if len(edited):
        delta = _delta(_stream(flat, rest, edited), table[edited], counts, runs, units, params, tallies)
        flat[edited] = (flat[edited].to(torch.float32) + delta).to(flat.dtype)
    read = (table[:, READ] >= 0).nonzero()[:, 0]
    if len(read):
        readings[table[read, READ].long()] = _stream(flat, rest, read)


def _stream(flat: Tensor, rest: Tensor | None, chosen: Tensor) -> Tensor:
    """The stream of some tokens, in the model's dtype."""
    return flat[chosen] if rest is None else flat[chosen] + rest[chosen]


def _delta(
    stream: Float[Tensor, "chosen d_model"],
    table: Int[Tensor, "chosen 3"],
    counts: Tensor,
    runs: Tensor,
    units: Tensor,
    params: Tensor,
    tallies: Tensor,
) -> Float[Tensor, "chosen d_model"]:
    x = stream.to(torch.float32)
    start = x.clone()
    slots, positions = table[:, SLOT].long(), table[:, POSITION]
    for k in range(units.shape[1]):
        on = (counts[slots] > k) & _inside(runs[slots, k], positions)
        if not bool(on.any()):
            continue
        place, unit = slots[on], units[slots[on], k]
        a, g, lo, hi, scale = params[place, k].unbind(dim=-1)
        projection = (x[on] * unit).sum(dim=-1)
        size = scale * (a + g * (torch.minimum(torch.maximum(projection, lo), hi) - projection))
        change = size.abs() / x[on].norm(dim=-1).clamp_min(_TINY)
        tallies[:, k].index_add_(0, place, torch.stack([torch.ones_like(change), change], dim=-1))
        x[on] += size[:, None] * unit
    return x - start


def _inside(runs: Int[Tensor, "chosen runs 2"], positions: Int[Tensor, " chosen"]) -> Bool[Tensor, " chosen"]:
    return ((runs[..., 0] <= positions[:, None]) & (positions[:, None] < runs[..., 1])).any(dim=-1)
