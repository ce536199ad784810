import pytest
import torch

import steerlab as sl
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import HookPointError, PlanError
from steerlab.steering._plan_assignment import assign_plans, group_by_plan
from steerlab.steering.vectors import SteeringVector

INFO = ModelInfo("tiny", None, "abc", "none", n_layers=4, d_model=2, d_vocab=10, context_length=16, dtype="float32")
V = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
A, B = sl.Plan(sl.add(V, coef=1.0)), sl.Plan(sl.add(V, dose=0.5))


def assign(plan, n=3):
    return assign_plans(plan, n, INFO, lambda *_: 10.0)


def test_one_plan_or_none_serves_all():
    assert [a.given_hash for a in assign(A)] == [A.hash] * 3
    assert [(a.given_hash, len(a.plan)) for a in assign(None)] == [(None, 0)] * 3


def test_a_list_gives_each_prompt_its_own():
    assigned = assign([A, None, sl.Plan(sl.add(V, coef=1.0))])
    assert [a.given_hash for a in assigned] == [A.hash, None, A.hash]
    assert [indices for _, indices in group_by_plan(assigned)] == [[0, 2], [1]]


def test_doses_are_resolved_and_the_given_hash_is_kept():
    (one,) = assign(B, 1)
    assert one.plan.edits[0].median_norm == 10.0
    assert one.given_hash == B.hash


@pytest.mark.parametrize("plan", [sl.add(V, coef=1.0), [sl.add(V, coef=1.0)] * 3, [A, None, "plan"], 3, "plan"])
@pytest.mark.usefixtures("unchecked_types")
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(PlanError, match=r"wrap edits in Plan\(\)"):
        assign(plan)


def test_a_list_has_one_plan_per_prompt():
    with pytest.raises(PlanError, match="2 plans for 3 prompts"):
        assign([A, None])


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(HookPointError):
        assign([None, None, sl.Plan(sl.add(V.at(4), coef=1.0))])
