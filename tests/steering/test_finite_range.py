"""Strengths that no model can hold are refused when a plan is made ready, by the name of the edit."""

from dataclasses import replace

import pytest
import torch

import steerlab as sl
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import PlanError
from steerlab.steering._finite_range import MAX_LENGTH
from steerlab.steering._plan_assignment import assign_plans
from steerlab.steering.operators import Ablate, Add
from steerlab.steering.vectors import SteeringVector

FLOAT32 = ModelInfo("tiny", None, "abc", "none", n_layers=4, d_model=2, d_vocab=10, context_length=16, dtype="float32")
BFLOAT16, FLOAT16 = replace(FLOAT32, dtype="bfloat16"), replace(FLOAT32, dtype="float16")
V = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
W = SteeringVector.from_tensor(torch.tensor([0.0, 1.0]), layer=1)


class Push(Add):
    """An operator of a user's own that adds a constant."""

    def to_json(self):
        return {"kind": "push", "amount": self.amount}


class Drop(Ablate):
    """An operator of a user's own that depends on the stream."""

    def to_json(self):
        return {"kind": "drop"}


def own(operator, scale=1.0):
    return replace(sl.ablate(V), operator=operator, scale=scale)


def ready(*edits, info=FLOAT32):
    return assign_plans(sl.Plan(*edits), 1, info, lambda *_: 10.0)


REFUSED = {
    "add a coefficient": (FLOAT32, [sl.add(V, coef=1e38)]),
    "add a dose": (BFLOAT16, [sl.add(V, dose=1e37)]),
    "add in float16": (FLOAT16, [sl.add(V, coef=5000.0)]),
    "set": (FLOAT32, [sl.set(V, coef=-1e30)]),
    "set in doses": (FLOAT32, [sl.set(V, dose=1e30)]),
    "clamp from below": (FLOAT32, [sl.clamp(V, lo=1e30)]),
    "clamp from above": (FLOAT32, [sl.clamp(V, hi=-1e30)]),
    "a scale": (FLOAT32, [sl.add(V, coef=1.0).scaled(1e30)]),
    "a scale on a projection": (FLOAT32, [sl.ablate(V).scaled(1e30)]),
    "a scale on a rotation": (FLOAT32, [sl.rotate(V, W, angle=1.0).scaled(1e30)]),
    "a schedule": (FLOAT32, [sl.add(V, coef=1.0, schedule=sl.schedule.constant(-1e30))]),
    "where a schedule ends": (FLOAT32, [sl.add(V, coef=1.0, schedule=sl.schedule.linear(0, 1e30, over=5))]),
    "however the norm is kept": (FLOAT32, [sl.add(V, coef=1e38, norm="keep")]),
    "scaled to nothing, which is 0 · inf": (FLOAT32, [sl.add(V, coef=1e38).scaled(0)]),
    "a sum": (FLOAT32, [sl.add(V, coef=MAX_LENGTH / 9), sl.add(W, coef=MAX_LENGTH / 2)]),
    "an operator of one's own": (FLOAT32, [own(Push(1e38, "coef"))]),
    "a scale on an operator of one's own": (FLOAT32, [own(Drop(), 1e30)]),
}
KEPT = {
    "a strong vector": (FLOAT32, [sl.add(V, coef=1e6)]),
    "just below the bound": (FLOAT32, [sl.add(V, coef=MAX_LENGTH / 5.001)]),
    "bounds that force nothing": (FLOAT32, [sl.clamp(V, lo=-1e30, hi=1e30)]),
    "float16": (FLOAT16, [sl.add(V, coef=4000.0)]),
    "many projections in float16": (FLOAT16, [sl.ablate(V), sl.ablate(W), sl.rotate(V, W, angle=1.0)]),
    "an operator of one's own": (FLOAT32, [own(Push(1.0, "coef")), own(Drop(), 3.0)]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_strengths_beyond_the_range_are_refused_by_name(case):
    info, edits = REFUSED[case]
    with pytest.raises(PlanError, match=rf"leaves the finite range of tiny, which runs in {info.dtype}") as caught:
        ready(*edits, info=info)
    assert str(caught.value).startswith(str(edits[-1]))


@pytest.mark.parametrize("case", KEPT)
def test_strengths_within_the_range_are_kept(case):
    info, edits = KEPT[case]
    assert len(ready(*edits, info=info)[0].plan) == len(edits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_leaves_a_norm_layer_finite(dtype):
    h = torch.full((1, 8), MAX_LENGTH / 8**0.5).to(dtype) + torch.randn(1, 8, dtype=dtype)
    normed = torch.nn.RMSNorm(8)(h.float())
    assert torch.isfinite(normed).all()
    torch.testing.assert_close(normed.abs().mean(), torch.tensor(1.0), rtol=1e-2, atol=0)


def test_hooks_of_such_a_plan_are_refused(tiny_llama_path):
    engine = sl.load(tiny_llama_path)
    vector = SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=1)
    with pytest.raises(PlanError, match="finite range"):
        sl.Plan(sl.add(vector, coef=1e38)).hooks(engine)
    with pytest.raises(PlanError, match="finite range"):
        engine.generate([[5, 6]], plan=[sl.Plan(sl.add(vector, coef=1e38))], max_new_tokens=2)
