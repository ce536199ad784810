"""Receipts from what workers counted: chunks, preemptions, inherited positions, and steps past the end."""

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import ReceiptError
from steerlab.engines.vllm._client.build_receipts import inherited_of, receipt_of
from steerlab.engines.vllm._client.compiled_plan import compile_plan
from steerlab.engines.vllm._client.requests import Outcome, Request
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.steering._plan_assignment import AssignedPlan

CONFIG = SteeringConfig((1,))


def request(runs=((0, 100),)):
    vector = sl.SteeringVector.from_tensor(torch.ones(4), layer=1)
    plan = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.all()))
    return Request(3, 5, (1,) * 10, {}, AssignedPlan(plan, plan.hash), compile_plan(plan, CONFIG), (runs,))


def receipt(ran, counted, length, runs=((0, 100),)):
    return receipt_of(request(runs), Outcome(None, ran, {0: (counted, 0.5 * counted, 0)}), length)


@pytest.mark.parametrize(
    ("ran", "counted", "length"),
    [
        ([(0, 20)], 20, 20),  # as it should be
        ([(0, 21)], 21, 20),  # one step past the end, already under way when the row ended
        ([(8, 20)], 12, 20),  # eight positions from the cache
        ([(0, 15), (8, 20)], 27, 20),  # preempted; four positions ran twice
        ([(8, 15), (0, 20)], 27, 20),  # preempted; what had come from the cache then ran
        ([(0, 15), (0, 9), (8, 20)], 36, 20),
    ],
)
def test_every_edited_position_counts_once(ran, counted, length):
    found = receipt(ran, counted, length)
    assert (found.prompt_index, found.row_index, found.edited, found.expected) == (3, 5, length, length)
    assert found.edits[0].mean_relative_change == 0.5


@pytest.mark.parametrize(("ran", "counted"), [([(0, 20)], 19), ([(0, 20)], 21), ([(8, 20)], 20)])
def test_another_count_is_an_error(ran, counted):
    with pytest.raises(ReceiptError, match="Row 5"):
        receipt(ran, counted, 20)


@pytest.mark.parametrize("ran", [[(0, 19)], [(0, 8), (9, 20)], [(4, 10), (12, 20)]])
def test_a_position_that_never_ran_is_an_error(ran):
    with pytest.raises(ReceiptError, match="went through the model"):
        receipt(ran, sum(b - a for a, b in ran), 20)


def test_inherited_positions_are_listed():
    outcome = Outcome(None, [(8, 20)], {0: (3, 1.0, 0)})
    asked = request(((2, 5), (7, 11)))
    assert inherited_of(asked, outcome, 20).positions == ((2, 3, 4, 7),)
    assert receipt_of(asked, outcome, 20).edited == 7


def test_nothing_inherited_and_nothing_edited():
    found = receipt([(0, 20)], 0, 20, runs=((30, 40),))
    assert (found.edited, found.expected) == (0, 0)
    assert found.edits[0].mean_relative_change != found.edits[0].mean_relative_change
