import copy
import json
import math
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import HookPointError, PlanError, VectorShapeError, VectorValueError
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector, VectorCard

INFO = ModelInfo("tiny", None, "abc", "none", n_layers=4, d_model=2, d_vocab=10, context_length=16, dtype="float32")
V = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
U = SteeringVector.from_tensor(torch.tensor([0.0, 1.0]), layer=1)
W = SteeringVector.from_tensor(torch.tensor([1.0, 0.0]), layer=3)
FULL = Plan(
    sl.add(V, dose=0.2),
    sl.add(W, coef=-1.5, where=sl.where.all()),
    sl.clamp(U, -1.0, 2.0, where=~sl.where.index(0, -1)),
    sl.clamp(U, hi=0.5, unit="dose", where=sl.where.generated(after=1, until=3) | sl.where.prompt()),
    sl.ablate(U),
)


def card(**entries):
    return SteeringVector(torch.tensor([3.0, 4.0]), HookPoint(1), VectorCard(**entries))


# --- identity -----------------------------------------------------------------------------------------------------


def test_equal_content_is_an_equal_plan():
    assert Plan(sl.add(V, coef=1.0)) == Plan(sl.add(V, coef=1.0))
    assert hash(Plan(sl.ablate(V))) == hash(Plan(sl.ablate(V)))
    assert len({FULL, Plan(*FULL.edits)}) == 1
    assert FULL != "plan"


@pytest.mark.parametrize(
    "other",
    [
        Plan(),
        Plan(sl.add(V, coef=1.1)),
        Plan(sl.add(V, dose=1.0)),
        Plan(sl.add(U, coef=1.0)),
        Plan(sl.add(V.at(2), coef=1.0)),
        Plan(sl.add(V.at(1, "resid_pre"), coef=1.0)),
        Plan(sl.add(V, coef=1.0, where=sl.where.all())),
        Plan(sl.add(V, coef=1.0), sl.add(V, coef=1.0)),
        Plan(sl.ablate(V)),
        Plan(sl.add(V, coef=1.0)).scaled(2.0),
        Plan(sl.add(V, coef=1.0)).scaled(0.0),
    ],
)
def test_any_difference_is_another_plan(other):
    assert other != Plan(sl.add(V, coef=1.0))
    assert other.hash != Plan(sl.add(V, coef=1.0)).hash


def test_order_is_part_of_the_plan():
    assert Plan(sl.add(V, coef=1.0), sl.ablate(U)) != Plan(sl.ablate(U), sl.add(V, coef=1.0))


def test_the_hash_is_the_same_in_every_process():
    assert Plan(sl.add(V, coef=1.0)).hash == "b44ae144c556a24e"


def test_doses_at_other_medians_are_other_plans():
    plan = Plan(sl.add(V, dose=0.1))
    assert plan.resolved(lambda *_: 10.0) == plan.resolved(lambda *_: 10.0)
    assert plan.resolved(lambda *_: 10.0) != plan.resolved(lambda *_: 11.0)


# --- immutability -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["edits", "_hash", "hash", "anything"])
def test_nothing_can_be_set(name):
    with pytest.raises(AttributeError, match="immutable"):
        setattr(Plan(sl.ablate(V)), name, ())


def test_transformations_leave_the_plan_alone():
    plan = Plan(sl.add(V, dose=0.1), sl.ablate(U))
    before = plan.hash
    plan.scaled(3.0)
    plan.resolved(lambda *_: 5.0)
    plan.with_vectors(lambda v: v.scaled(2.0))
    _ = plan + plan
    assert Plan(*plan.edits).hash == plan.hash == before
    assert plan.edits[0].median_norm is None


def test_edits_are_immutable():
    with pytest.raises(AttributeError):
        FULL.edits[0].scale = 2.0


# --- composition --------------------------------------------------------------------------------------------------


def test_plus_concatenates_in_order():
    a, b = Plan(sl.add(V, coef=1.0)), Plan(sl.ablate(U), sl.ablate(W))
    assert (a + b).edits == (*a.edits, *b.edits)
    assert a + b != b + a
    assert (a + b) + a == a + (b + a)
    assert a + Plan() == a
    with pytest.raises(PlanError, match="wrap edits"):
        _ = a + sl.ablate(U)


def test_scaled_multiplies_every_edit():
    assert [edit.scale for edit in FULL.scaled(0.5)] == [0.5] * 5
    assert FULL.scaled(0.5).scaled(2.0) == FULL == FULL.scaled(1)
    assert FULL.scaled(np.float64(0.5)) == FULL.scaled(0.5)


@pytest.mark.parametrize("factor", [math.nan, math.inf, "2", None, True])
@pytest.mark.usefixtures("unchecked_types")
def test_a_bad_factor_is_refused(factor):
    with pytest.raises(PlanError, match="finite number"):
        FULL.scaled(factor)


def test_hook_points_in_order_of_first_use():
    assert [p.name for p in FULL.hook_points] == ["blocks.1.hook_resid_post", "blocks.3.hook_resid_post"]


@pytest.mark.parametrize("part", [V, torch.ones(2), None, [sl.ablate(V)], Plan(sl.ablate(V))])
@pytest.mark.usefixtures("unchecked_types")
def test_a_plan_is_made_of_edits(part):
    with pytest.raises(PlanError, match="made of edits"):
        Plan(part)


def test_a_zero_vector_is_refused_when_the_plan_is_made():
    with pytest.raises(VectorValueError, match="zero"):
        Plan(sl.add(V.scaled(0.0), coef=1.0))


def test_text_names_operator_strength_place_and_positions():
    assert str(Plan(sl.add(V, coef=2.0))) == "add(coef=2) at blocks.1.hook_resid_post, last_prompt() | generated()"
    assert "× 0.5" in str(Plan(sl.ablate(V)).scaled(0.5))
    assert FULL.hash in repr(FULL)
    assert str(Plan()) == "(no edits)"


# --- doses --------------------------------------------------------------------------------------------------------


def test_resolving_asks_for_each_edit_that_needs_it():
    asked = []
    resolved = FULL.resolved(lambda layer, site: asked.append((layer, site)) or 7.0)
    assert asked == [(1, "resid_post"), (1, "resid_post")]
    assert [edit.median_norm for edit in resolved] == [7.0, None, None, 7.0, None]
    assert resolved.resolved(lambda *_: 99.0) == resolved


def test_a_cards_median_is_used_where_it_was_measured():
    v = card(extracted_at=HookPoint(1).name, median_norm=7.0)
    assert sl.add(v, dose=0.1).median_norm == 7.0
    assert sl.add(v, coef=0.1).median_norm is None
    assert sl.add(v.at(2), dose=0.1).median_norm is None


@pytest.mark.parametrize("median", [0.0, -1.0, math.nan, math.inf])
def test_an_unusable_median_is_refused(median):
    with pytest.raises(PlanError, match="median norm"):
        Plan(sl.add(V, dose=0.1)).resolved(lambda *_: median)


# --- fit to a model -----------------------------------------------------------------------------------------------


def test_a_plan_that_fits_passes_silently():
    assert FULL.check(INFO) is FULL


def test_another_width_names_both_shapes():
    with pytest.raises(VectorShapeError, match=r"\[2\].*\[64\]"):
        FULL.check(replace(INFO, d_model=64))


def test_a_layer_past_the_last_is_refused():
    with pytest.raises(HookPointError, match="Layer 3 does not exist"):
        FULL.check(replace(INFO, n_layers=3))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"extracted_at": "blocks.0.hook_resid_post"}, "extracted at blocks.0"),
        ({"model": "other"}, "made on other"),
        ({"model": "tiny", "weights_hash": "xyz"}, "weights xyz"),
        ({"weight_processing": "compatibility_mode"}, "compatibility_mode"),
    ],
)
def test_a_vector_from_elsewhere_is_warned_of_by_name(entries, message):
    with pytest.warns(UserWarning, match=message):
        Plan(sl.add(card(**entries), coef=1.0)).check(INFO)


def test_a_vector_from_here_is_not_warned_of():
    here = card(model="tiny", weights_hash="abc", weight_processing="none", extracted_at=HookPoint(1).name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Plan(sl.add(here, coef=1.0)).check(INFO)


# --- storage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(), FULL, FULL.scaled(0.1), FULL.resolved(lambda *_: 0.1), FULL.scaled(0.0)])
def test_json_round_trip(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.edits == plan.edits
    assert [e.vector.card for e in again] == [e.vector.card for e in plan]


def test_pickle_and_copies():
    for again in (pickle.loads(pickle.dumps(FULL)), copy.copy(FULL), copy.deepcopy(FULL)):
        assert again == FULL


def changed(**entries):
    data = json.loads(Plan(sl.add(V, dose=0.5)).resolved(lambda *_: 3.0).to_json())
    data["edits"][0] |= entries
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "edits": [{}]}',
        '{"format": 2, "edits": []}',
        "[" * 100_000,
        changed(scale=math.nan),
        changed(scale="1"),
        changed(scale=None),
        changed(median_norm=math.nan),
        changed(median_norm="3"),
        changed(median_norm=-3.0),
        changed(operator={"kind": "add", "amount": math.inf, "unit": "dose"}),
        changed(where={"kind": "nowhere"}),
        changed(vector={"hook_point": "w", "values": "", "card": {}}),
        changed(vector={"hook_point": "blocks.1.hook_resid_post", "values": "AAA", "card": {}}),
        changed(vector={"hook_point": "blocks.1.hook_resid_post", "values": "AAAAAAAAwH8=", "card": {}}),
        changed(vector={"hook_point": "blocks.1.hook_resid_post", "values": "AACAPwAAgD8=", "card": []}),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_a_further_vector_from_elsewhere_is_noticed():
    plan = Plan(sl.rotate(V, W, angle=1.0))
    with pytest.warns(UserWarning, match=r"toward of rotate.*extracted at blocks\.3.* applied at blocks\.1"):
        plan.check(INFO)
    there = SteeringVector.from_tensor(torch.tensor([1.0, 0.0]), layer=1, model="another")
    with pytest.warns(UserWarning, match=r"reference of set.*made on another, not tiny"):
        Plan(sl.set(V, 0.0, reference=there)).check(INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Plan(sl.set(V, 0.0, reference=U), sl.rotate(V, U, angle=1.0)).check(INFO)


def test_a_median_norm_of_unstated_weights_is_measured_anew_and_a_users_own_is_kept():
    card = replace(V.card, model="some", extracted_at=V.hook_point.name, median_norm=999.0)
    plan = Plan(sl.add(replace(V, card=card), dose=0.5))
    assert plan.edits[0].median_norm == 999.0
    assert plan.resolved(lambda *_: 44.0, "hash").edits[0].median_norm == 44.0
    own = Plan(plan.edits[0].with_median_norm(7.0))
    assert own.resolved(lambda *_: 44.0, "hash").edits[0].median_norm == 7.0
