import pytest
import torch

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.steering._run import PlanRun
from steerlab.steering.positions import schedule
from steerlab.steering.positions._rows import RowPositions

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
J = torch.tensor([[-2, -1, 0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (schedule.constant(0.5), [0.5] * 8),
        (schedule.linear(1.0, 0.0, over=4), [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        (schedule.linear(0.0, 2.0, over=2), [0, 0, 0, 1, 2, 2, 2, 2]),
        (schedule.decay(2.0), [1, 1, 1, 2**-0.5, 0.5, 2**-1.5, 0.25, 2**-2.5]),
        (schedule.window(1, 3), [0, 0, 0, 1, 1, 0, 0, 0]),
        (schedule.window(until=2), [1, 1, 1, 1, 0, 0, 0, 0]),
        (schedule.window(3), [0, 0, 0, 0, 0, 1, 1, 1]),
    ],
    ids=str,
)
def test_factor_per_generated_index_by_hand(made, expected):
    assert made.factor(J)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "made",
    [schedule.constant(0.5), schedule.linear(1.0, 0.0, over=4), schedule.decay(2.5), schedule.window(1, 3)],
    ids=str,
)
def test_round_trip_through_json_and_identity_by_content(made):
    assert schedule.from_json(made.to_json()) == made
    plan = sl.Plan(sl.add(V, coef=1.0, schedule=made))
    again = sl.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.edits[0].schedule == made
    assert plan != sl.Plan(sl.add(V, coef=1.0))


def test_an_edit_follows_its_schedule_and_zero_counts_as_not_edited():
    plan = sl.Plan(sl.add(V, coef=1.0, schedule=schedule.linear(1.0, 0.0, over=2)))
    h = torch.ones(1, 6, 2)
    run = PlanRun(plan, 1)
    run.begin(RowPositions.of_rows([6], [2]))
    after = run.edit(V.hook_point, h)
    assert ((after - h)[0, :, 0] / 3).tolist() == pytest.approx([0, 1, 1, 0.5, 0, 0])
    (receipt,) = run.receipts(
        token_ids=[[1] * 6], prompt_lens=[2], prompt_indices=[0], row_indices=[0], plan_hash=plan.hash
    )
    assert receipt.edited == receipt.expected == 3


def test_scaling_a_plan_multiplies_the_schedule():
    edit = sl.set(V, 2.0, schedule=schedule.constant(0.5)).scaled(0.5)
    # u·h = 6·.6 + 0 = 3.6, wanted 2: Δ = −1.6 u, a quarter of it
    h = torch.tensor([[6.0, 0.0]])
    factors = torch.tensor([0.5])
    assert edit.delta(h, factors)[0].tolist() == pytest.approx([-0.4 * 0.6, -0.4 * 0.8])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: schedule.decay(0.0),
        lambda: schedule.linear(1.0, 0.0, over=0),
        lambda: schedule.linear(float("nan"), 0.0, over=3),
        lambda: schedule.window(3, 3),
        lambda: schedule.window(-1),
        lambda: schedule.from_json({"kind": "sine"}),
        lambda: schedule.from_json({"kind": "decay", "life": 2}),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(PlanError):
        wrong()


def test_something_else_in_place_of_a_schedule_is_refused(unchecked_types):
    with pytest.raises(PlanError, match=r"sl\.schedule"):
        sl.add(V, coef=1.0, schedule=0.5)
