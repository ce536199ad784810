"""The operator in plain torch: what runs on a CPU, and the meaning that the GPU kernel is tested against."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from steerlab.engines.vllm._wire import plan_tables as column
from steerlab.engines.vllm._worker.tables import ANSWERS, POSITION, READ, SLOT, PointTables
from steerlab.steering.operators._edit import norm_kept

_TINY = torch.finfo(torch.float32).tiny


def edit_rows(
    hidden: Float[Tensor, "*tokens d_model"], residual: Float[Tensor, "*tokens d_model"] | None, *tables: Tensor
) -> None:
    """Edits the stream hidden + residual by changing `hidden`, in float32, and reads what is asked for after it.

    Args:
        hidden: the tensor that is changed, in place.
        residual: what the stream consists of beside it; None if `hidden` is the stream.
        tables: those of `PointTables`, in order; tallies are counted up and readings written in place.
    """
    of = PointTables(*tables)
    flat = hidden.view(-1, hidden.shape[-1])
    rest = None if residual is None else residual.reshape(-1, hidden.shape[-1])
    table = of.tokens[: flat.shape[0]]
    edited = (table[:, SLOT] >= 0).nonzero()[:, 0]
    if len(edited):
        if of.probes.shape[1] and bool(of.probes[:, :, 0].any()):
            _read_conditions(_stream(flat, rest, edited), table[edited], of)
        delta = _delta(_stream(flat, rest, edited), table[edited], of)
        flat[edited] = (flat[edited].to(torch.float32) + delta).to(flat.dtype)
    read = (table[:, READ] >= 0).nonzero()[:, 0]
    if len(read):
        of.readings[table[read, READ].long()] = _stream(flat, rest, read)


def _stream(flat: Tensor, rest: Tensor | None, chosen: Tensor) -> Tensor:
    """The stream of some tokens, in the model's dtype."""
    return flat[chosen] if rest is None else flat[chosen] + rest[chosen]


def _delta(
    stream: Float[Tensor, "chosen d_model"], table: Int[Tensor, "chosen 4"], of: PointTables
) -> Float[Tensor, "chosen d_model"]:
    x = stream.to(torch.float32)
    start = x.clone()
    slots, positions = table[:, SLOT].long(), table[:, POSITION]
    for k in range(max(of.counts[slots].tolist(), default=0)):
        on = (of.counts[slots] > k) & _acts(of.runs[slots, k], positions, table[:, ANSWERS])
        if bool(on.any()):
            on = _allowed(on, slots, k, of)
        if not bool(on.any()):
            continue
        place = slots[on]
        settings = of.edits[place, k]
        generated = (positions[on] - of.origins[place]).clamp_min(0)
        change = _factor(settings, generated)[:, None] * _summed(x[on], place, settings, of)
        keeps = settings[:, column.KEEP, None] > 0
        change = torch.where(keeps, norm_kept(x[on], change), change)
        relative = change.norm(dim=-1) / x[on].norm(dim=-1).clamp_min(_TINY)
        of.tallies[:, k].index_add_(
            0, place, torch.stack([torch.ones_like(relative), relative, torch.zeros_like(relative)], dim=-1)
        )
        x[on] += change
    return x - start


def _read_conditions(stream: Float[Tensor, "chosen d_model"], table: Int[Tensor, "chosen 4"], of: PointTables) -> None:
    """Adds what conditions read here, before any edit, to their answers."""
    x, slots = stream.to(torch.float32), table[:, SLOT].long()
    for c in range(of.probes.shape[1]):
        probes = of.probes[slots, c]
        on = (probes[:, 0] > 0) & _inside(of.reads[slots, c], table[:, POSITION])
        place = slots[on]
        reading = (x[on] * of.vectors[place, probes[on, 0].long() - 1]).sum(dim=-1)
        cosine = reading / x[on].norm(dim=-1).clamp_min(_TINY)
        reading = torch.where(probes[on, 1] > 0, cosine, reading)
        of.answers[:, c].index_add_(0, place, torch.stack([reading, torch.ones_like(reading)], dim=-1))


def _allowed(
    on: Bool[Tensor, " chosen"], slots: Int[Tensor, " chosen"], k: int, of: PointTables
) -> Bool[Tensor, " chosen"]:
    """Those tokens for which an edit's condition, if it has one, has passed; counts those that came too early."""
    asks, truth = of.edits[slots, k, column.ASKS].long(), of.edits[slots, k, column.TRUTH].long()
    answered, index = torch.ones_like(on), torch.zeros_like(asks)
    for c in range(of.answers.shape[1]):
        (total, count), (above, below, needed) = of.answers[slots, c].unbind(-1), of.limits[slots, c].unbind(-1)
        answered &= ((asks >> c & 1) == 0) | (count >= needed)
        index |= ((total > above * count) & (total < below * count)).long() << c
    early = slots[on & ~answered]
    of.tallies[:, k, 2].index_add_(0, early, torch.ones(len(early)))
    return on & ((asks == 0) | (answered & ((truth >> index & 1) == 1)))


def _factor(settings: Float[Tensor, "chosen 10"], generated: Int[Tensor, " chosen"]) -> Float[Tensor, " chosen"]:
    """Scale times schedule, at the index of each token among the generated ones."""
    j = generated.to(torch.float32)
    share = (j / settings[:, column.OVER]).clamp_max(1.0)
    line = settings[:, column.START] * (1 - share) + settings[:, column.END] * share
    return settings[:, column.SCALE] * line * torch.exp2(-j / settings[:, column.HALF_LIFE])


def _summed(
    x: Float[Tensor, "chosen d_model"], place: Int[Tensor, " chosen"], settings: Tensor, of: PointTables
) -> Float[Tensor, "chosen d_model"]:
    """The sum of one edit's terms for each token; tokens of several slots have edits of their own."""
    total = torch.zeros_like(x)
    first, count = settings[:, column.FIRST].long(), settings[:, column.COUNT].long()
    for term in range(int(count.max())):
        on = count > term
        slots = place[on]
        row = of.terms[slots, first[on] + term]
        value = _gated(x[on], slots, row, of)
        total[on] += value[:, None] * of.vectors[slots, row[:, column.WRITE].long()]
    return total


def _gated(x: Tensor, slots: Tensor, row: Float[Tensor, "chosen 9"], of: PointTables) -> Float[Tensor, " chosen"]:
    """The gate of one term for each token."""
    _, _, amount, gain, lo, hi, slope, threshold, bias = row.unbind(dim=-1)
    reads = row[:, column.READ].long()
    z = (x * of.vectors[slots, reads.clamp_min(0)]).sum(dim=-1) + bias
    value = amount + slope * z + gain * torch.minimum(torch.maximum(z, lo), hi)
    return torch.where(reads < 0, amount, torch.where(z > threshold, value, 0.0))


def _acts(
    runs: Int[Tensor, "chosen runs 3"], positions: Int[Tensor, " chosen"], answers: Int[Tensor, " chosen"]
) -> Bool[Tensor, " chosen"]:
    """Which tokens lie in a run that acts with these answers of their request's token rules."""
    covered = (runs[..., 0] <= positions[:, None]) & (positions[:, None] < runs[..., 1])
    return (covered & ((runs[..., 2] >> answers[:, None] & 1) > 0)).any(dim=-1)


def _inside(runs: Int[Tensor, "chosen runs 2"], positions: Int[Tensor, " chosen"]) -> Bool[Tensor, " chosen"]:
    return ((runs[..., 0] <= positions[:, None]) & (positions[:, None] < runs[..., 1])).any(dim=-1)
