"""Slots and accounts of one worker, without a model: what is written, counted and handed over, and when."""

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.engines.vllm._client.compiled_plan import compile_plan
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.engines.vllm._worker.op_torch import edit_rows
from steerlab.engines.vllm._worker.tables import Tables

pytestmark = pytest.mark.vllm

WIDTH = 6
CONFIG = SteeringConfig((1, 2, 3), max_directions=2, max_runs=2, capture_tokens=4)
EVERYWHERE = (((0, 100),),)


def vector(layer, seed):
    values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(10 * layer + seed))
    return sl.SteeringVector.from_tensor(values, layer=layer)


PLANS = {
    "a": sl.Plan(sl.add(vector(1, 0), coef=1.0), sl.add(vector(3, 0), coef=2.0), sl.add(vector(1, 1), coef=3.0)),
    "b": sl.Plan(sl.add(vector(3, 2), coef=4.0)),
    "elsewhere": sl.Plan(sl.add(vector(2, 2), coef=4.0)),
}


@pytest.fixture
def state():
    """Of a rank that holds the layers 1 and 3 of the three that are wired."""
    from steerlab.engines.vllm._worker.steering_state import SteeringState

    tables = Tables.make(
        CONFIG, n_points=2, n_slots=4, n_tokens=32, d_model=WIDTH, dtype=torch.float32, device=torch.device("cpu")
    )
    made = SteeringState(CONFIG, tables, [0, 2])
    for name, plan in PLANS.items():
        compiled = compile_plan(plan, CONFIG)
        made.hold(name, compiled.tables)
    return made


def run(state, *rows):
    """One pass of (slot, start, length); the edits it makes at each of the two layers."""
    state.begin(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))
    hidden = torch.zeros(2, sum(length for _, _, length in rows), WIDTH)
    for layer in range(2):
        edit_rows(hidden[layer], None, *state.tables.of_point(layer))
    return hidden


def counted(state, *rows):
    """Per row the edits of this rank and how many tokens each edited."""
    return counted_of(state, state.settle(rows))


def counted_of(state, accounts):
    tallies = state.tallies(accounts.values())
    return {
        row: dict(zip(edits.tolist(), values[:, 0].tolist(), strict=True))
        for row, (edits, values) in zip(accounts, tallies, strict=True)
    }


def test_requests_that_enter_together_get_their_own_directions(state):
    state.enter(2, RequestSpec("x", "a", EVERYWHERE))
    state.enter(0, RequestSpec("y", "b", (((1, 2),),)))
    state.enter(1, None)
    state.enter(3, RequestSpec("z", "elsewhere", EVERYWHERE))
    hidden = run(state, (0, 0, 2), (1, 0, 1), (2, 5, 1), (3, 0, 1))
    expected = torch.zeros(2, 5, WIDTH)
    expected[0, 3] = vector(1, 0).values + 3 * vector(1, 1).values
    expected[1, 3] = 2 * vector(3, 0).values
    expected[1, 1] = 4 * vector(3, 2).values
    torch.testing.assert_close(hidden, expected)
    assert counted(state, "x", "y", "z", "nobody") == {"x": {0: 1, 1: 1, 2: 1}, "y": {0: 1}, "z": {}}


def test_many_directions_cross_in_several_goes(state, monkeypatch):
    from steerlab.engines.vllm._worker import steering_state

    monkeypatch.setattr(steering_state, "STAGED", 2 * 4 * WIDTH)
    for slot in range(4):
        state.enter(slot, RequestSpec(f"{slot}", "b", EVERYWHERE))
    torch.testing.assert_close(
        run(state, *((slot, 0, 1) for slot in range(4)))[1], (4 * vector(3, 2).values).expand(4, -1)
    )
    assert counted(state, *"0123") == {row: {0: 1} for row in "0123"}


def test_a_slot_that_changes_hands_keeps_the_accounts_apart(state):
    state.enter(0, RequestSpec("x", "a", EVERYWHERE))
    run(state, (0, 0, 3))
    state.leave(0)
    state.enter(0, RequestSpec("y", "b", EVERYWHERE))
    assert not run(state, (0, 0, 2))[0].any()
    assert counted(state, "y", "x") == {"y": {0: 2}, "x": {0: 3, 1: 3, 2: 3}}


def test_a_request_that_leaves_before_it_ran_leaves_nothing(state):
    state.enter(0, RequestSpec("x", "a", EVERYWHERE))
    run(state, (0, 0, 3))
    state.leave(0)
    state.enter(0, RequestSpec("y", "b", EVERYWHERE))
    state.leave(0)
    state.enter(0, None)
    assert not run(state, (0, 0, 4)).any()
    accounts = state.settle(["x", "y"])
    assert (accounts["x"].ran, accounts["y"].ran) == ([(0, 3)], [])
    assert [values[:, 0].tolist() for _, values in state.tallies(accounts.values())] == [[3, 3, 3], [0]]


def test_a_preempted_request_goes_on_with_its_account(state):
    spec = RequestSpec("x", "b", EVERYWHERE)
    state.enter(0, spec)
    run(state, (0, 0, 3))
    state.leave(0)
    state.enter(0, spec)
    state.leave(0)
    state.enter(2, spec)
    run(state, (2, 0, 4))
    run(state, (2, 4, 1))
    accounts = state.settle(["x"])
    assert accounts["x"].ran == [(0, 3), (0, 5)]
    ((edits, values),) = state.tallies(accounts.values())
    assert (edits.tolist(), values[:, 0].tolist()) == ([0], [8])
    assert state.settle(["x"]) == {}


@pytest.fixture
def asking(state):
    """The state with a plan whose edit asks a condition that reads the positions 1 and 3."""
    when = sl.when(vector(1, 7), above=0.0, read=sl.where.index(1, 3))
    made = compile_plan(sl.Plan(sl.add(vector(3, 2), coef=4.0, when=when)), CONFIG)
    state.hold("asking", made.tables)
    spec = RequestSpec("x", "asking", (((4, 100),), ((1, 2), (3, 4))), n_reads=1)

    def run_from(slot, start, length, reads=1.0):
        """One pass, in which the stream at the first layer is so many times the probe; what the edit did."""
        state.begin(np.array([slot]), np.array([start]), np.array([length]))
        stream = (reads * vector(1, 7).values).repeat(length, 1)
        edit_rows(stream, None, *state.tables.of_point(0))
        hidden = torch.zeros(length, WIDTH)
        edit_rows(hidden, None, *state.tables.of_point(1))
        return hidden

    return state, spec, run_from


def test_an_answer_is_held_while_a_request_waits(asking):
    state, spec, run_from = asking
    state.enter(0, spec)
    run_from(0, 0, 3)
    state.leave(0)  # between two chunks of its prompt
    state.enter(2, spec)
    assert run_from(2, 3, 2)[1:].any()
    state.leave(2)
    state.enter(1, RequestSpec("y", "b", EVERYWHERE))
    state.enter(3, spec)
    assert run_from(3, 5, 1).any()
    accounts = state.settle(["x"])
    assert counted_of(state, accounts) == {"x": {0: 2}}
    (answers,) = state.answers(accounts.values())
    assert answers[:, 1].tolist() == [2]
    assert answers[0, 0] == pytest.approx(2 * float(vector(1, 7).values.norm()))


def test_a_request_that_runs_anew_is_asked_anew(asking):
    state, spec, run_from = asking
    state.enter(0, spec)
    assert not run_from(0, 0, 5, reads=-1.0).any()
    state.leave(0)
    state.enter(1, spec)
    assert run_from(1, 1, 4)[3].any()  # what came before was in the cache
    (answers,) = state.answers(state.settle(["x"]).values())
    assert answers[:, 1].tolist() == [2]


def test_an_edit_before_its_answer_is_counted_and_not_made(asking):
    state, _, run_from = asking
    early = RequestSpec("x", "asking", (((0, 3),), ((1, 2), (3, 4))), n_reads=1)
    state.enter(0, early)
    assert not run_from(0, 0, 3).any()
    ((_, values),) = state.tallies(state.settle(["x"]).values())
    assert values.tolist() == [[0, 0, 3]]


def test_a_pass_between_leaves_what_others_have_sat_down_for(state):
    state.enter(0, RequestSpec("x", "b", EVERYWHERE))
    state.begin_empty()
    assert run(state, (0, 0, 1))[1].any()
    state.enter(1, RequestSpec("y", "b", EVERYWHERE))
    assert run(state, (0, 1, 1), (1, 0, 1))[1].any(dim=-1).all()
    assert counted(state, "x", "y") == {"x": {0: 2}, "y": {0: 1}}


def test_a_plan_that_is_not_held_is_a_problem_of_that_request(state):
    state.enter(0, RequestSpec("x", "unknown", EVERYWHERE))
    assert not run(state, (0, 0, 1)).any()
    accounts = state.settle(["x"])
    assert "unknown is not held" in accounts["x"].problem
    ((edits, values),) = state.tallies(accounts.values())
    assert (len(edits), values.shape) == (0, (0, 3))


def test_steps_of_one_token_go_on_from_the_last_pass(state):
    """The same edits, positions and accounts as when every pass is stated anew."""
    where = (((2, 4), (6, 7)),)
    state.enter(1, RequestSpec("x", "b", where))
    state.enter(2, None)
    state.enter(0, RequestSpec("y", "b", (((9, 11),),)))
    edited = []
    for step in range(6):
        hidden = run(state, (2, 4 + step, 1), (1, 1 + step, 1), (0, 8 + step, 1))
        edited.append([bool(row.any()) for row in hidden[1]])
    expected = [[False, 1 + s in {2, 3, 6}, 8 + s in {9, 10}] for s in range(6)]
    assert edited == expected
    assert counted(state, "x", "y") == {"x": {0: 3}, "y": {0: 2}}


def test_a_request_that_enters_leaves_or_jumps_ends_the_run_of_steps(state):
    state.enter(0, RequestSpec("x", "b", EVERYWHERE))
    state.enter(1, RequestSpec("y", "b", (((0, 3),),)))
    run(state, (0, 0, 1), (1, 0, 1))
    run(state, (0, 1, 1), (1, 1, 1))
    state.leave(0)
    state.enter(0, RequestSpec("z", "b", (((50, 60),),)))
    assert [bool(row.any()) for row in run(state, (0, 2, 1), (1, 2, 1))[1]] == [False, True]
    assert [bool(row.any()) for row in run(state, (0, 3, 1), (1, 3, 1))[1]] == [False, False]
    assert [bool(row.any()) for row in run(state, (1, 4, 1), (0, 4, 1))[1]] == [False, False]
    assert [bool(row.any()) for row in run(state, (1, 1, 1), (0, 50, 1))[1]] == [True, True]
    accounts = state.settle(["x", "y", "z"])
    assert accounts["x"].ran == [(0, 2)]
    assert accounts["y"].ran == [(0, 5), (1, 2)]
    assert accounts["z"].ran == [(2, 5), (50, 51)]
    assert counted_of(state, accounts) == {"x": {0: 2}, "y": {0: 4}, "z": {0: 1}}
