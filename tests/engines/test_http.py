"""What travels between a remote engine and its server: it comes back as it was, and what is none is refused."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core.errors import EngineError, InputError, PlanError, SteerlabError
from steerlab.core.results import Completion, Generations, Measured
from steerlab.core.token_sets import TokenSets
from steerlab.engines._http.failures import failure_json, failure_of, status_of
from steerlab.engines._http.frames import SIZE, CutOffError, Frame, frames_in, read_frame
from steerlab.engines._http.plain import plain_result
from steerlab.engines._http.plans import plans_in, plans_message
from steerlab.engines._http.results import activations_in, generations_in, measured_in, result_frame, scores_in
from steerlab.engines.toy import ToyEngine
from steerlab.measures.quantities import LogDistribution, TokenLogProb

PROMPTS, TARGETS = ["one two", "three"], [["four", "five"], ["six"]]
WIDTH = 32


def vector(seed, layer=1):
    values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=layer, name=f"v{seed}")


@pytest.fixture(scope="module")
def engine():
    return ToyEngine()


@pytest.fixture(scope="module")
def plan():
    late = sl.add(
        vector(1), coef=1.0, when=sl.when(vector(2, 0), above=-1e9), schedule=sl.schedule.decay(half_life=3.0)
    )
    return sl.Plan(
        late,
        sl.rotate(vector(3), toward=vector(4), angle=0.3),
        sl.clamp(vector(1), hi=2.0),
        sl.set(vector(5), coef=2.0),
    )


def sent(frame):
    return read_frame(frame.encoded())


# --- messages -----------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.floats(width=64), max_size=20),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    texts=st.lists(st.text(max_size=5), max_size=3),
)
@settings(deadline=None, max_examples=50)
def test_messages_come_back_wherever_they_are_cut(values, cuts, texts):
    frames = [Frame({"texts": texts}, {"x": np.array(values)}), Frame({"done": 1})]
    data, chunks = b"".join(frame.encoded() for frame in frames), []
    while data:
        size = cuts[len(chunks) % len(cuts)]
        chunks.append(data[:size])
        data = data[size:]
    first, second = frames_in(chunks, 10_000)
    assert (first.content, second.content) == ({"texts": texts}, {"done": 1})
    assert first.arrays["x"].tobytes() == np.array(values).tobytes()  # NaN and −0.0 too


@pytest.mark.parametrize(
    ("data", "error", "fragment"),
    [
        (b"nothing\n", InputError, "line of JSON"),
        (b"[1]\n", InputError, SIZE),
        (b'{"array_bytes": -1}\n', InputError, SIZE),
        (b'{"array_bytes": true}\n', InputError, SIZE),
        (b'{"array_bytes": 4}\nab', CutOffError, "cut off"),
        (b'{"a": 1', CutOffError, "cut off"),
        (b'{"array_bytes": 4}\nabcd', InputError, "not safetensors"),
        (b'{"array_bytes": 2000}\n', InputError, "longer than the 100 bytes"),
        (b"x" * 200, InputError, "longer than the 100 bytes"),
        (b"[" * 99 + b"\n", InputError, "line of JSON"),
    ],
)
def test_what_is_no_message_is_refused(data, error, fragment):
    with pytest.raises(error, match=fragment):
        list(frames_in([data], 100))


def test_a_message_is_json_without_nan():
    with pytest.raises(InputError, match="without NaN"):
        Frame({"a": math.nan}).encoded()
    with pytest.raises(InputError, match="one message, got 2"):
        read_frame(Frame({}).encoded() * 2)


# --- results ------------------------------------------------------------------------------------------------------


def test_scores_and_receipts_come_back(engine, plan):
    scores = engine.score(PROMPTS, TARGETS, plan=plan, variants=("", " "))
    found = scores_in(sent(result_frame(scores)))
    assert found == scores
    assert found.receipts == scores.receipts
    assert found.receipts[0].edits[0].condition_passed is True


def test_completions_and_activations_come_back(engine, plan):
    made = engine.generate(PROMPTS, plan=[plan, None], n=2, max_new_tokens=4, seed=1)
    found = generations_in(sent(result_frame(made)))
    assert (found, found.receipts) == (made, made.receipts)
    for pool in (None, "mean"):
        read = engine.capture(PROMPTS, layers=[0, 2], plan=plan, pool=pool)
        back = activations_in(sent(result_frame(read)))
        assert (back.positions, back.layers, back.pool, back.site) == (read.positions, read.layers, pool, read.site)
        assert all(torch.equal(a, b) for a, b in zip(back.values, read.values, strict=True))
        assert back.receipts == read.receipts


def test_numbers_that_json_has_not_come_back():
    sets = [TokenSets.of([[1, 2], [0]], 5), TokenSets.of([], 5)]
    rows = [
        Completion("a", [1, 2], "length", 0, 0, [-0.5, -math.inf], [math.nan, 0.0], sets[0]),
        Completion("", [], "error", 1, 0, [], [], sets[1]),
    ]
    error = sl.NonFiniteError("not finite")
    found = generations_in(sent(result_frame(Generations(tuple(rows), ((3,), (4,)), "x", (), {1: error}))))
    assert found[0].token_log_probs == [-0.5, -math.inf]
    assert math.isnan(found[0].token_log_qs[0])
    assert [c.supports for c in found] == sets
    assert (type(found.errors[1]), str(found.errors[1])) == (sl.NonFiniteError, "not finite")


def test_measures_come_back_with_their_dtypes(engine):
    measured = engine.measure(PROMPTS, TARGETS, {"p": TokenLogProb(), "all": LogDistribution()})
    wide = Measured([{name: np.asarray(v) for name, v in row.items()} for row in measured], measured.receipts)
    found = measured_in(sent(result_frame(wide)))
    for a, b in zip(found, wide, strict=True):
        assert list(a) == ["p", "all"]
        assert all(a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]) for name in a)
    assert found.receipts == wide.receipts
    assert measured_in(sent(result_frame(Measured()))) == []


def test_plain_json_has_a_row_each(engine, plan):
    scores = engine.score(PROMPTS, TARGETS, plan=plan)
    rows = json.loads(json.dumps(plain_result(scores), allow_nan=False))["rows"]
    assert [row["log_prob"] for row in rows] == list(scores.log_prob)
    assert [sum(e["edited"] for e in row["edits"]) for row in rows] == [r.edited for r in scores.receipts]
    (row, _) = plain_result(Measured([{"q": np.array([-math.inf, -1.0])}, {"q": np.array([math.nan])}]))["rows"]
    assert row == {"q": [None, -1.0], "edits": []}


# --- plans --------------------------------------------------------------------------------------------------------


def test_plans_come_back_and_a_vector_travels_once(plan):
    given = [plan, None, plan.scaled(0.5), plan]
    content, arrays = plans_message(given, WIDTH)
    assert len(content["plans"]) == 2
    assert len(arrays) == 5
    frame = sent(Frame(content, arrays))
    found = plans_in(frame.content, frame.arrays)
    assert found == given
    assert [one and one.vector_names for one in found] == [
        one and sl.Plan.from_json(one.to_json()).vector_names for one in given
    ]
    assert plans_in(*plans_message(None, WIDTH)) is None
    assert plans_in(*plans_message(plan, WIDTH)) == plan
    assert "values" not in json.dumps(content).replace('"values": {"$tensor"', "")


def test_plans_that_are_none_are_refused(plan):
    with pytest.raises(PlanError, match="takes a Plan"):
        plans_message([plan, "north"], WIDTH)
    content, arrays = plans_message(plan, WIDTH)
    for wrong in ({}, {name: one.astype(np.float64) for name, one in arrays.items()}):
        with pytest.raises(PlanError, match="no float32 vector"):
            plans_in(content, wrong)
    for place in (1, -1, "0", True):
        with pytest.raises(InputError, match="plan_of"):
            plans_in({**content, "plan_of": place}, arrays)
    with pytest.raises(PlanError):
        plans_in({"plans": [{"format": 1, "edits": [{"vector": 3}]}], "plan_of": 0}, {})
    with pytest.raises(InputError, match="list of plans"):
        plans_in({"plans": "x"}, {})


# --- errors -------------------------------------------------------------------------------------------------------


def test_errors_keep_their_class_and_strange_ones_become_ours():
    error = failure_of(json.loads(json.dumps(failure_json(sl.ContextLengthError("too long")))))
    assert (type(error), str(error)) == (sl.ContextLengthError, "too long")
    for kind in ("SystemExit", "Any", "", "annotations"):
        assert type(failure_of({"kind": kind, "message": "x"})) is EngineError
    assert [status_of(e) for e in (sl.PlanError(""), EngineError(""), SteerlabError(""))] == [400, 503, 500]
