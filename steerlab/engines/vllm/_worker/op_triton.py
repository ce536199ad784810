"""The operator as a Triton kernel: one program per token, a loop over its edits, float32 throughout.

A program whose token is neither edited nor read loads two numbers and ends. Nothing is read back to the host, and all
pointers are persistent buffers, so the launch can be part of a CUDA graph.
"""

import triton
import triton.language as tl
from torch import Tensor

from steerlab.engines.vllm._worker.tables import PointTables


# No argument may be called `params`: Triton's generated launcher has a variable of that name. The widths of `edits`
# (10) and `terms` (9), and their columns, are those of `_wire.plan_tables`.
@triton.jit
def _covered(runs, position, RUNS: tl.constexpr):
    acts = position < 0  # never: no run covers it yet
    for run in tl.static_range(RUNS):  # pyright: ignore[reportGeneralTypeIssues]
        first = tl.load(runs + run * 2)
        last = tl.load(runs + run * 2 + 1)
        acts = acts | ((first <= position) & (position < last))
    return acts


@triton.jit
def _acts(runs, position, answers, RUNS: tl.constexpr):
    acts = position < 0  # never: no run covers it yet
    for run in tl.static_range(RUNS):  # pyright: ignore[reportGeneralTypeIssues]
        first = tl.load(runs + run * 3)
        last = tl.load(runs + run * 3 + 1)
        truth = tl.load(runs + run * 3 + 2)
        acts = acts | ((first <= position) & (position < last) & (((truth >> answers) & 1) > 0))
    return acts


@triton.jit
def _read_kernel(
    hidden,
    residual,
    tokens,
    vectors,
    probes,
    reads,
    answers,
    hidden_stride,
    residual_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    RUNS: tl.constexpr,
    CONDITIONS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Adds what conditions read at this hook point to their answers; the next launch there uses them."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(tokens + token * 4)
    if slot >= 0:
        position = tl.load(tokens + token * 4 + 1)
        columns = tl.arange(0, BLOCK)
        inside = columns < D
        place = slot.to(tl.int64)
        for condition in range(CONDITIONS):
            row = place * CONDITIONS + condition
            probe = tl.load(probes + row * 2).to(tl.int32)
            if probe > 0:
                if _covered(reads + row * RUNS * 2, position, RUNS):
                    raw = tl.load(hidden + token * hidden_stride + columns, mask=inside, other=0.0)
                    x = raw.to(tl.float32)
                    if HAS_RESIDUAL:
                        rest = tl.load(residual + token * residual_stride + columns, mask=inside, other=0.0)
                        x = (x + rest.to(tl.float32)).to(raw.dtype).to(tl.float32)
                    along = tl.load(vectors + (place * DIRECTIONS + probe - 1) * D + columns, mask=inside, other=0.0)
                    reading = tl.sum(x * along, axis=0)
                    if tl.load(probes + row * 2 + 1) > 0:
                        reading = reading / tl.maximum(tl.sqrt(tl.sum(x * x, axis=0)), 1.1754944e-38)
                    tl.atomic_add(answers + row * 2, reading)
                    tl.atomic_add(answers + row * 2 + 1, 1.0)


@triton.jit
def _edit_kernel(
    hidden,
    residual,
    tokens,
    origins,
    counts,
    runs,
    edits,
    terms,
    vectors,
    limits,
    answers,
    tallies,
    readings,
    hidden_stride,
    residual_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EDITS: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    RUNS: tl.constexpr,
    CONDITIONS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(tokens + token * 4)
    read = tl.load(tokens + token * 4 + 2)
    if (slot >= 0) | (read >= 0):
        position = tl.load(tokens + token * 4 + 1)
        answers_of_rules = tl.maximum(tl.load(tokens + token * 4 + 3), 0)
        columns = tl.arange(0, BLOCK)
        inside = columns < D
        raw = tl.load(hidden + token * hidden_stride + columns, mask=inside, other=0.0)
        own = raw.to(tl.float32)
        rest = tl.zeros_like(own)
        if HAS_RESIDUAL:
            rest = tl.load(residual + token * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        start = (own + rest).to(raw.dtype).to(tl.float32)  # the stream as the model would round it
        x = start
        place = tl.maximum(slot, 0).to(tl.int64)
        generated = tl.maximum(position - tl.load(origins + place), 0).to(tl.float32)
        count = tl.where(slot >= 0, tl.load(counts + place), 0)
        for k in range(count):
            row = place * EDITS + k
            settings = edits + row * 10
            acts = _acts(runs + row * RUNS * 3, position, answers_of_rules, RUNS)
            asks = tl.load(settings + 8).to(tl.int32)
            if CONDITIONS > 0:
                answered = position >= 0
                index = 0
                for condition in tl.static_range(CONDITIONS):  # pyright: ignore[reportGeneralTypeIssues]
                    of = place * CONDITIONS + condition
                    total = tl.load(answers + of * 2)
                    number = tl.load(answers + of * 2 + 1)
                    asked = ((asks >> condition) & 1) > 0
                    answered = answered & ((asked == 0) | (number >= tl.load(limits + of * 3 + 2)))
                    passed = (total > tl.load(limits + of * 3) * number) & (
                        total < tl.load(limits + of * 3 + 1) * number
                    )
                    index = index | (passed.to(tl.int32) << condition)
                truth = ((tl.load(settings + 9).to(tl.int32) >> index) & 1) > 0
                if acts & (asks > 0) & (answered == 0):
                    tl.atomic_add(tallies + row * 3 + 2, 1.0)
                acts = acts & ((asks == 0) | (answered & truth))
            if acts:
                delta = tl.zeros_like(x)
                first_term = tl.load(settings).to(tl.int32)
                for index in range(first_term, first_term + tl.load(settings + 1).to(tl.int32)):
                    term = terms + (place * EDITS + index) * 9
                    reads = tl.load(term).to(tl.int32)
                    writes = tl.load(term + 1).to(tl.int32)
                    value = tl.load(term + 2)
                    if reads >= 0:
                        along = tl.load(vectors + (place * DIRECTIONS + reads) * D + columns, mask=inside, other=0.0)
                        z = tl.sum(x * along, axis=0) + tl.load(term + 8)
                        clipped = tl.minimum(tl.maximum(z, tl.load(term + 4)), tl.load(term + 5))
                        value = value + tl.load(term + 6) * z + tl.load(term + 3) * clipped
                        value = tl.where(z > tl.load(term + 7), value, 0.0)
                    along = tl.load(vectors + (place * DIRECTIONS + writes) * D + columns, mask=inside, other=0.0)
                    delta = delta + value * along
                share = tl.minimum(generated / tl.load(settings + 6), 1.0)
                line = tl.load(settings + 4) * (1.0 - share) + tl.load(settings + 5) * share
                factor = tl.load(settings + 3) * line * tl.exp2(-generated / tl.load(settings + 7))
                delta = factor * delta
                norm = tl.sqrt(tl.sum(x * x, axis=0))
                if tl.load(settings + 2) > 0:
                    whole = x + delta
                    after = tl.sqrt(tl.sum(whole * whole, axis=0))
                    delta = whole * tl.where(after > 0, norm / after, 1.0) - x
                size = tl.sqrt(tl.sum(delta * delta, axis=0))
                tl.atomic_add(tallies + row * 3, 1.0)
                tl.atomic_add(tallies + row * 3 + 1, size / tl.maximum(norm, 1.1754944e-38))
                x = x + delta
        changed = (own + (x - start)).to(raw.dtype)
        if slot >= 0:
            tl.store(hidden + token * hidden_stride + columns, changed, mask=inside)
        if read >= 0:
            result = (changed.to(tl.float32) + rest).to(raw.dtype)
            tl.store(readings + read.to(tl.int64) * D + columns, result, mask=inside)


def launch(hidden: Tensor, residual: Tensor | None, *tables: Tensor) -> None:
    """Runs the kernel on the tokens of a pass; see `op_torch.edit_rows` for the meaning."""
    of = PointTables(*tables)
    width = hidden.shape[-1]
    flat = hidden.view(-1, width)
    rest = flat if residual is None else residual.view(-1, width)
    block = triton.next_power_of_2(width)
    n_conditions = of.probes.shape[1]
    if n_conditions:
        _read_kernel[(flat.shape[0],)](
            flat,
            rest,
            of.tokens,
            of.vectors,
            of.probes,
            of.reads,
            of.answers,
            flat.stride(0),
            rest.stride(0),
            D=width,
            BLOCK=block,
            DIRECTIONS=of.vectors.shape[1],
            RUNS=of.runs.shape[2],
            CONDITIONS=n_conditions,
            HAS_RESIDUAL=residual is not None,
            num_warps=4 if block <= 4096 else 8,  # pyright: ignore[reportCallIssue]
        )
    _edit_kernel[(flat.shape[0],)](
        flat,
        rest,
        of.tokens,
        of.origins,
        of.counts,
        of.runs,
        of.edits,
        of.terms,
        of.vectors,
        of.limits,
        of.answers,
        of.tallies,
        of.readings,
        flat.stride(0),
        rest.stride(0),
        D=width,
        BLOCK=block,
        EDITS=of.edits.shape[1],
        DIRECTIONS=of.vectors.shape[1],
        RUNS=of.runs.shape[2],
        CONDITIONS=n_conditions,
        HAS_RESIDUAL=residual is not None,
        num_warps=4 if block <= 4096 else 8,  # pyright: ignore[reportCallIssue]
    )
