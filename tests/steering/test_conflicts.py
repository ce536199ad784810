import pytest
import torch

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.steering.conflicts import may_meet
from steerlab.steering.positions import where

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
BACK = V.scaled(-2.0)
OTHER = sl.SteeringVector.from_tensor(torch.tensor([4.0, 3.0]), layer=1)
R = sl.SteeringVector.from_tensor(torch.tensor([1.0, 1.0]), layer=1)


@pytest.mark.parametrize(
    "edits",
    [
        (sl.set(V, 1.0), sl.set(V, 2.0)),
        (sl.set(V, 1.0), sl.ablate(V)),
        (sl.ablate(V), sl.set(V, dose=0.1)),
        (sl.set(V, 1.0), sl.set(BACK, 1.0)),
        (sl.clamp(V, 1.0, 2.0), sl.clamp(V, 3.0, 4.0)),
        (sl.clamp(V, 1.0, 2.0), sl.clamp(BACK, 1.0, 2.0)),
        (sl.clamp(V, lo=1.0), sl.ablate(V)),
        (sl.clamp(V, hi=1.0), sl.set(V, 2.0)),
        (sl.set(V, 1.0, where=where.all()), sl.set(V, 2.0, where=where.index(-1))),
        (sl.set(V, 1.0, where=where.span("x")), sl.set(V, 2.0, where=where.span("x"))),
    ],
    ids=lambda edits: " / ".join(str(edit.operator) for edit in edits),
)
def test_demands_that_no_projection_meets_are_a_conflict(edits):
    with pytest.raises(PlanError, match="conflict"):
        sl.Plan(*edits)


@pytest.mark.parametrize(
    "edits",
    [
        (sl.add(V, coef=1.0), sl.ablate(V)),
        (sl.ablate(V), sl.add(V, coef=1.0)),
        (sl.add(V, coef=1.0), sl.add(V, coef=1.0)),
        (sl.set(V, 1.0), sl.set(BACK, -1.0)),
        (sl.set(V, 1.0), sl.set(OTHER, 2.0)),
        (sl.set(V, 1.0), sl.set(V.at(2), 2.0)),
        (sl.clamp(V, 1.0, 3.0), sl.clamp(V, 2.0, 4.0)),
        (sl.clamp(V, 1.0, 2.0), sl.clamp(BACK, -2.0, -1.0)),
        (sl.clamp(V, -1.0, 1.0), sl.ablate(V)),
        (sl.set(V, coef=1.0), sl.set(V, dose=2.0)),
        (sl.set(V, 1.0, reference=R), sl.set(V, 2.0)),
        (sl.set(V, 1.0, where=where.prompt()), sl.set(V, 2.0, where=where.generated())),
        (sl.set(V, 1.0), sl.set(V, 2.0).scaled(0.5)),
        (sl.set(V, 1.0, when=sl.when(V, above=0.0)), sl.set(V, 2.0)),
    ],
    ids=lambda edits: " / ".join(map(str, edits))[:90],
)
def test_edits_that_can_stand_together_are_a_plan(edits):
    assert len(sl.Plan(*edits)) == 2


def test_the_unsteered_arm_of_any_plan_is_a_plan():
    assert len((sl.Plan(sl.set(V, 1.0)) + sl.Plan(sl.set(V, 1.0))).scaled(0.0)) == 2


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        (where.prompt(), where.generated(), False),
        (where.prompt(), where.last_prompt(), True),
        (where.generated(0, 3), where.generated(3), False),
        (where.generated(0, 4), where.generated(3), True),
        (where.index(0), where.index(-1), True),  # a prompt of one token
        (where.all(), ~where.all(), False),
        (where.default(), where.generated(), True),
    ],
    ids=str,
)
def test_which_sets_meet(a, b, meet):
    assert may_meet(a, b) is may_meet(b, a) is meet
