"""The operator against the reference implementation of steering, and the GPU kernel against the operator."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.engines.vllm._client.compiled_plan import compile_plan
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.plan_tables import READ, WRITE
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.engines.vllm._wire.runs import runs_of
from steerlab.engines.vllm._worker.op_torch import edit_rows
from steerlab.engines.vllm._worker.steering_state import SteeringState
from steerlab.engines.vllm._worker.tables import Tables
from steerlab.steering._run import PlanRun
from steerlab.steering.operators import Edit, Gate, Operator, Term
from steerlab.steering.positions._rows import RowPositions
from tests.interpreted import run_interpreted

pytestmark = pytest.mark.vllm

WIDTH, LENGTH, PROMPT = 6, 9, 4
CONFIG = SteeringConfig((1, 2), max_directions=6, max_runs=4, capture_tokens=16)
w = sl.where
WHERES = [w.all(), w.prompt(), w.last_prompt(), w.generated(), w.generated(1, 3), w.index(0, -1), ~w.index(2)]


def vector(seed, layer=1, site="resid_post"):
    values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=layer, site=site)


class Feature(Operator):
    """Reads along one direction and writes along another, only where the reading exceeds a threshold."""

    unit = "coef"

    def __init__(self, threshold, bias):
        self.threshold, self.bias = threshold, bias

    def terms(self, along):
        read = vector(17).values
        gate = Gate(2.0, gain=0.5, lo=-1.0, hi=1.0, slope=-1.0, threshold=self.threshold)
        return (Term(along.unit, gate, read, self.bias), Term(read, Gate(gain=1.0, lo=0.0), along.unit))

    def to_json(self):
        return {"kind": "feature", "numbers": [self.threshold, self.bias]}


MAKERS = {
    "add": lambda seed, coef, options: sl.add(vector(seed), coef=coef, **options),
    "ablate": lambda seed, coef, options: sl.ablate(vector(seed), **options),
    "clamp": lambda seed, coef, options: sl.clamp(vector(seed), -abs(coef), abs(coef), **options),
    "above": lambda seed, coef, options: sl.clamp(vector(seed), lo=coef, **options),
    "set": lambda seed, coef, options: sl.set(vector(seed), coef, reference=vector(seed + 1), **options),
    "rotate": lambda seed, coef, options: sl.rotate(vector(seed), vector(seed + 1), angle=coef, **options),
    "feature": lambda seed, coef, options: replace(
        sl.ablate(vector(seed), **options), operator=Feature(coef, coef / 2)
    ),
}
SCHEDULES = [
    None,
    sl.schedule.constant(-0.5),
    sl.schedule.linear(1.0, -1.0, over=2),
    sl.schedule.decay(1.5),
    sl.schedule.window(1, 3),
]
edits = st.builds(
    lambda kind, seed, coef, where, norm, schedule, scale: MAKERS[kind](
        seed, coef, {"where": where, "norm": norm, "schedule": schedule}
    ).scaled(scale),
    st.sampled_from(list(MAKERS)),
    st.integers(0, 5),
    st.floats(-3, 3),
    st.sampled_from(WHERES),
    st.sampled_from([None, "keep"]),
    st.sampled_from(SCHEDULES),
    st.sampled_from([0.0, 0.5, 1.0, -2.0]),
)


def tables_for(plan, dtype=torch.float32):
    """Buffers in which slot 1 holds the plan, for the layer 1."""
    tables = Tables.make(
        CONFIG, n_points=2, n_slots=3, n_tokens=12, d_model=WIDTH, dtype=dtype, device=torch.device("cpu")
    )
    made = compile_plan(plan, CONFIG)
    state = SteeringState(CONFIG, tables, [0, 1])
    state.hold("plan", made.tables)
    rows = RowPositions.of_rows([LENGTH], [PROMPT])
    groups = tuple(runs_of(selection.resolve(rows)[0].numpy()) for selection in made.selections)
    state.enter(1, RequestSpec("x", "plan", groups, origin=PROMPT))
    state.begin(np.array([1]), np.array([0]), np.array([LENGTH]))
    return tables


def reference(plan, h):
    run = PlanRun(plan, 1)
    run.begin(RowPositions.of_rows([LENGTH], [PROMPT]))
    edited = run.edit(plan.edits[0].hook_point, h[None])[0]
    return edited, *run.counts()


@settings(max_examples=60)
@given(st.lists(edits, min_size=1, max_size=3), st.integers(0, 3), st.booleans())
def test_the_operator_equals_the_reference(made, seed, has_residual):
    plan = sl.Plan(*made)
    h = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    residual = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed + 9)) if has_residual else None
    stream = h if residual is None else h + residual
    expected, edited, changes = reference(plan, stream)
    tables = tables_for(plan)
    hidden = h.clone()
    edit_rows(hidden, residual, *tables.of_point(0))
    found = hidden if residual is None else hidden + residual
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    tallies = tables.tallies[0, 1, compile_plan(plan, CONFIG).tables.places]
    assert tallies[:, 0].tolist() == edited[:, 0].tolist()
    torch.testing.assert_close(tallies[:, 1], changes[:, 0], atol=1e-3, rtol=1e-3)


def test_edits_of_strength_zero_leave_every_bit(unchecked_types):
    plan = sl.Plan(sl.add(vector(0), coef=2.0, where=w.all()), sl.ablate(vector(1), where=w.all())).scaled(0.0)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, residual = torch.randn(LENGTH, WIDTH).to(dtype), torch.randn(LENGTH, WIDTH).to(dtype)
        before = hidden.clone()
        edit_rows(hidden, residual, *tables_for(plan, dtype).of_point(0))
        assert torch.equal(hidden, before)
        assert hidden.dtype == dtype


def test_other_tokens_are_not_touched_and_wanted_ones_are_read():
    plan = sl.Plan(sl.add(vector(0), coef=2.0, where=w.all()))
    tables = tables_for(plan)
    tables.tokens[3:, 0] = -1
    tables.tokens[[1, 7], 2] = torch.tensor([4, 2], dtype=torch.int32)
    hidden, residual = torch.randn(LENGTH, WIDTH), torch.randn(LENGTH, WIDTH)
    before = hidden.clone()
    edit_rows(hidden, residual, *tables.of_point(0))
    assert torch.equal(hidden[3:], before[3:])
    torch.testing.assert_close(hidden[:3], before[:3] + 2 * vector(0).values)
    torch.testing.assert_close(tables.readings[0, [4, 2]], (hidden + residual)[[1, 7]])
    assert not tables.readings[0, [0, 1, 3]].any()


def test_the_registered_operator_calls_it_and_compiles():
    import steerlab.engines.vllm._worker.op  # noqa: F401  registers the operator

    plan = sl.Plan(sl.add(vector(0), coef=2.0, where=w.all()))
    layer = tables_for(plan).of_point(0)

    def block(x):
        hidden = x * 2
        torch.ops.steerlab.edit(hidden, None, *layer)
        return hidden + 1

    x = torch.randn(LENGTH, WIDTH)
    expected = x * 2 + 2 * vector(0).values + 1
    torch.testing.assert_close(block(x), expected)
    torch.testing.assert_close(torch.compile(block, backend="aot_eager", fullgraph=True)(x), expected)


def test_the_gpu_kernel_equals_the_operator():
    """In Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    run_interpreted(_KERNEL)


_KERNEL = """
import torch
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._worker.op_torch import edit_rows
from steerlab.engines.vllm._worker.op_triton import launch
from steerlab.engines.vllm._worker.tables import PointTables, Tables

torch.manual_seed(0)
inf = float("inf")
for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
    for has_residual in (True, False):
        made = []
        config = SteeringConfig((0,), 3, 2, 4)
        table = Tables.make(config, n_points=1, n_slots=3, n_tokens=8, d_model=20, dtype=dtype,
                            device=torch.device("cpu")).of_point(0)
        table.tokens[:6] = torch.tensor([[0, 0, -1, 1], [0, 1, 2, 0], [1, 5, 0, 2], [-1, 0, 1, 0], [2, 7, -1, 0],
                                         [-1, 3, -1, -1]])
        table.origins[1] = 3
        table.counts[:] = torch.tensor([2, 3, 0])
        # from, to, and with which answers of the token rules; all bits, or some that hold, or one that does not
        table.runs[0, 0] = torch.tensor([[0, 1, -1], [1, 2, 0b1110]])
        table.runs[0, 1] = torch.tensor([[0, 1, 0b10], [1, 3, 0b01]])
        table.runs[1, :, 0] = torch.tensor([5, 6, 0b100])
        vectors = torch.randn(3, 3, 20)
        table.vectors[:] = vectors / vectors.norm(dim=-1, keepdim=True)
        # first, count, keeps the norm, scale, start, end, over, half-life, asks, truth
        table.edits[:, 0] = torch.tensor([0, 1, 0, 1.0, 1, 1, 1, inf, 0, 0])
        table.edits[:, 1] = torch.tensor([1, 2, 1, 0.5, 1, -1, 3, inf, 0, 0])
        table.edits[:, 2] = torch.tensor([3, 1, 0, 2.0, 1, 1, 1, 1.5, 3, 0b1110])
        table.edits[0, 1, 8:] = torch.tensor([1.0, 0b1010])
        # condition 0 of slot 0 reads position 0 only after its first edit asks, that of slot 1 before
        table.probes[0, 0] = torch.tensor([2.0, 0])
        table.probes[1] = torch.tensor([[1.0, 0], [3.0, 1]])
        table.reads[:2, :, 0] = torch.tensor([[[0, 2], [0, 0]], [[5, 6], [5, 6]]])
        table.limits[0] = torch.tensor([[-inf, inf, 2], [-inf, inf, 0]])
        table.limits[1] = torch.tensor([[0.0, inf, 1], [-inf, 0.1, 1]])
        # read, write, amount, gain, lo, hi, slope, threshold, bias
        table.terms[:, 0] = torch.tensor([-1, 0, 2.0, 0, -inf, inf, 0, -inf, 0])
        table.terms[:, 1] = torch.tensor([1, 2, 0.5, 1, -0.1, 0.2, -1, -inf, 0.3])
        table.terms[:, 2] = torch.tensor([2, 1, 0, 0, -inf, inf, 1.5, 0.0, 0])
        table.terms[:, 3] = torch.tensor([0, 0, 0, 0, -inf, inf, -1, -inf, 0])
        hidden = torch.randn(7, 20).to(dtype)
        residual = torch.randn(7, 20).to(dtype) if has_residual else None
        for run in (edit_rows, launch):
            mine = hidden.clone()
            own = PointTables(*(t.clone() for t in table))
            run(mine, residual, *own)
            made.append((mine, own.tallies, own.answers, own.readings))
        assert (made[0][0] - hidden).abs().sum() > 1
        assert made[0][1][..., 0].sum() >= 5
        assert made[0][1][0, :2, 0].tolist()[0] == 1
        assert made[0][2][:2, :, 1].tolist() == [[2, 0], [1, 1]]
        for one, other in zip(*made):
            torch.testing.assert_close(one, other, atol=bound, rtol=bound)
"""


# --- compiling plans ----------------------------------------------------------------------------------------------


def test_edits_of_one_layer_keep_their_order_and_the_next_layers_input_comes_last():
    plan = sl.Plan(
        sl.add(vector(0, 2, "resid_pre"), coef=1.0), sl.add(vector(1, 1), coef=1.0), sl.add(vector(2, 1), coef=1.0)
    )
    compiled = compile_plan(plan, CONFIG)
    assert compiled.tables.points.tolist() == [0, 0, 0]
    assert compiled.tables.places.tolist() == [2, 0, 1]
    assert compiled.groups == [0, 0, 0]


def test_edits_along_one_direction_share_it():
    plan = sl.Plan(sl.add(vector(0), coef=1.0), sl.ablate(vector(0)), sl.rotate(vector(0), vector(1), angle=1.0))
    tables = compile_plan(plan, CONFIG).tables
    assert (len(tables.edits), len(tables.terms), len(tables.vectors)) == (3, 6, 2)
    assert tables.terms[:, [READ, WRITE]].tolist() == [[-1, 0], [0, 0], [0, 0], [1, 0], [0, 1], [1, 1]]


def test_identity_is_by_content():
    one = compile_plan(sl.Plan(sl.add(vector(0), coef=1.0)), CONFIG)
    same = compile_plan(sl.Plan(sl.add(vector(0), coef=1.0)), CONFIG)
    assert one.fingerprint == same.fingerprint
    others = [
        sl.Plan(sl.add(vector(0), coef=1.0, norm="keep")),
        sl.Plan(sl.add(vector(0), coef=1.0, schedule=sl.schedule.decay(3.0))),
        sl.Plan(sl.add(vector(0), coef=1.0, schedule=sl.schedule.decay(4.0))),
        sl.Plan(sl.add(vector(1), coef=1.0)),
        sl.Plan(sl.add(vector(0), coef=2.0)),
        sl.Plan(sl.add(vector(0), coef=1.0)).scaled(0.5),
        sl.Plan(sl.add(vector(0, 2), coef=1.0)),
        sl.Plan(sl.ablate(vector(0))),
    ]
    prints = {compile_plan(plan, CONFIG).fingerprint for plan in others}
    assert len(prints) == len(others)
    assert one.fingerprint not in prints


class Shrink(Operator):
    """Is no sum of gated terms."""

    unit = "coef"

    def delta(self, h, along):
        return -h.tanh()

    def to_json(self):
        return {"kind": "shrink"}


def test_what_is_not_wired_is_refused_by_name():
    cases = [
        (sl.Plan(sl.add(vector(0, 3), coef=1.0)), r"layers=\[1, 2, 3\]"),
        (sl.Plan(sl.add(vector(0, 0, "resid_pre"), coef=1.0)), "resid_post of the one before"),
        (sl.Plan(sl.add(vector(0, 1, "mlp_out"), coef=1.0)), r"sites=\['resid_post', 'mlp_out'\]"),
        (sl.Plan(sl.add(vector(0, 3, "mlp_out"), coef=1.0)), r"layers=\[1, 2, 3\], sites="),
        (sl.Plan(*(sl.add(vector(s), coef=1.0) for s in range(7))), "max_directions=7"),
        (sl.Plan(*(sl.add(vector(0), coef=1.0) for _ in range(13))), "max_directions=7"),
        (sl.Plan(Edit(Shrink(), vector(0), w.all())), "states no terms"),
    ]
    for plan, words in cases:
        with pytest.raises(PlanError, match=words):
            compile_plan(plan, CONFIG)
