import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.steering import where
from steerlab.steering.operators import operator_from_json
from steerlab.steering.vectors import SteeringVector

V = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)  # unit (.6, .8)

streams = st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4).map(lambda x: torch.tensor(x).reshape(2, 2))


def delta(edit, *h, median=None):
    edit = edit if median is None else edit.with_median_norm(median)
    return edit.delta(torch.tensor([h])).flatten().tolist()


def applied(edit, h):
    return h + edit.delta(h)


# --- worked by hand -----------------------------------------------------------------------------------------------


def test_add_coef_adds_the_vector_times_coef():
    assert delta(sl.add(V, coef=2.0), 5.0, 5.0) == [6, 8]
    assert delta(sl.add(V, coef=-0.5), 0.0, 0.0) == [-1.5, -2]


def test_add_dose_adds_a_norm_in_units_of_the_median():
    assert delta(sl.add(V, dose=0.2), 5.0, 5.0, median=100.0) == pytest.approx([12, 16])
    assert delta(sl.add(V.scaled(7.0), dose=0.2), 5.0, 5.0, median=100.0) == pytest.approx([12, 16])


def test_ablate_removes_the_component():
    # u·h = .6·10 + .8·0 = 6, so Δ = −6 u
    assert delta(sl.ablate(V), 10.0, 0.0) == pytest.approx([-3.6, -4.8])
    assert delta(sl.ablate(V), -4.0, 3.0) == pytest.approx([0, 0], abs=1e-6)


def test_clamp_moves_the_projection_to_the_nearest_bound():
    # u·h = 6
    assert delta(sl.clamp(V, hi=5.0), 10.0, 0.0) == pytest.approx([-0.6, -0.8])
    assert delta(sl.clamp(V, lo=8.0), 10.0, 0.0) == pytest.approx([1.2, 1.6])
    assert delta(sl.clamp(V, lo=0.0, hi=7.0), 10.0, 0.0) == pytest.approx([0, 0], abs=1e-6)


def test_clamp_bounds_in_doses_are_multiples_of_the_median():
    assert delta(sl.clamp(V, hi=0.05, unit="dose"), 10.0, 0.0, median=100.0) == pytest.approx([-0.6, -0.8])
    assert delta(sl.clamp(V, lo=0.08, unit="dose"), 10.0, 0.0, median=100.0) == pytest.approx([1.2, 1.6])


def test_a_dose_without_a_median_is_an_error_not_a_nan():
    with pytest.raises(PlanError, match="median norm there is unknown"):
        delta(sl.add(V, dose=0.2), 1.0, 1.0)


# --- properties ---------------------------------------------------------------------------------------------------


@given(streams)
def test_ablating_twice_is_ablating_once(h):
    once = applied(sl.ablate(V), h)
    torch.testing.assert_close(applied(sl.ablate(V), once), once, atol=1e-4, rtol=0)
    assert (once @ V.unit).abs().max() < 1e-4


@given(streams, st.floats(-50, 50), st.floats(0, 50))
def test_after_a_clamp_the_projection_is_within_bounds_and_nothing_else_moved(h, lo, width):
    after = applied(sl.clamp(V, lo, lo + width), h)
    projection = after @ V.unit
    assert (projection >= lo - 1e-3).all()
    assert (projection <= lo + width + 1e-3).all()
    across = torch.tensor([-0.8, 0.6])
    torch.testing.assert_close(after @ across, h @ across, atol=1e-3, rtol=0)


@given(streams)
def test_a_clamp_that_holds_already_is_the_identity_to_the_bit(h):
    assert torch.equal(applied(sl.clamp(V, lo=-1000.0, hi=1000.0), h), h)


@given(streams)
def test_clamping_to_zero_is_ablating(h):
    torch.testing.assert_close(sl.clamp(V, 0.0, 0.0).delta(h), sl.ablate(V).delta(h), atol=1e-5, rtol=0)


@given(streams, st.floats(-3, 3), st.sampled_from([sl.add(V, coef=1.5), sl.ablate(V), sl.clamp(V, hi=1.0)]))
def test_scaling_multiplies_delta_for_every_operator(h, factor, edit):
    torch.testing.assert_close(edit.scaled(factor).delta(h), factor * edit.delta(h))
    assert torch.equal(applied(edit.scaled(0.0), h), h)


def test_a_scaled_edit_does_not_keep_an_old_direction():
    edit = sl.add(V, dose=1.0).with_median_norm(10.0)
    assert delta(edit, 0.0, 0.0) == pytest.approx([6, 8])
    assert delta(edit.with_median_norm(20.0), 0.0, 0.0) == pytest.approx([12, 16])
    other = SteeringVector.from_tensor(torch.tensor([0.0, 2.0]), layer=1)
    assert delta(edit.with_vector(other), 0.0, 0.0) == pytest.approx([0, 10])


def test_moving_an_edit_to_another_layer_forgets_the_median():
    edit = sl.add(V, dose=1.0).with_median_norm(10.0)
    assert edit.with_vector(V.at(2)).median_norm is None
    assert edit.with_vector(V.scaled(2.0)).median_norm == 10.0


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [{}, {"dose": 1.0, "coef": 1.0}])
def test_add_takes_exactly_one_strength(strength):
    with pytest.raises(PlanError, match="exactly one strength"):
        sl.add(V, **strength)


@pytest.mark.parametrize("name", ["dose", "coef"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True, [1.0]])
@pytest.mark.usefixtures("unchecked_types")
def test_bad_strengths_are_refused(name, value):
    with pytest.raises(PlanError, match=name):
        sl.add(V, **{name: value})


@pytest.mark.parametrize("value", [1, np.float32(1.0), np.float64(1.0), np.int64(1)])
@pytest.mark.usefixtures("unchecked_types")
def test_numpy_numbers_are_numbers(value):
    assert sl.add(V, dose=value) == sl.add(V, dose=1.0)
    assert sl.clamp(V, hi=value) == sl.clamp(V, hi=1.0)


@pytest.mark.usefixtures("unchecked_types")
def test_bad_clamps_are_refused():
    with pytest.raises(PlanError, match="needs a bound"):
        sl.clamp(V)
    with pytest.raises(PlanError, match="lo ≤ hi"):
        sl.clamp(V, 2.0, 1.0)
    with pytest.raises(PlanError, match="unit"):
        sl.clamp(V, hi=1.0, unit="bits")
    with pytest.raises(PlanError, match="hi"):
        sl.clamp(V, hi=math.nan)


@pytest.mark.usefixtures("unchecked_types")
def test_edits_take_vectors_and_positions():
    with pytest.raises(PlanError, match=r"from_tensor"):
        sl.add(torch.ones(2), coef=1.0)
    with pytest.raises(PlanError, match=r"sl\.where"):
        sl.ablate(V, where="all")


def test_the_default_reaches_the_first_generated_token():
    assert sl.add(V, coef=1.0).where == where.last_prompt() | where.generated()


@pytest.mark.parametrize(
    "edit",
    [sl.add(V, coef=1.5), sl.add(V, dose=0.1), sl.ablate(V), sl.clamp(V, hi=1.0), sl.clamp(V, -2.0, 1.0, unit="dose")],
)
def test_json_round_trip(edit):
    assert operator_from_json(edit.operator.to_json()) == edit.operator


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"kind": "rot13"},
        {"kind": "add"},
        {"kind": "add", "amount": "much", "unit": "coef"},
        {"kind": "add", "amount": math.nan, "unit": "coef"},
        {"kind": "add", "amount": math.inf, "unit": "coef"},
        {"kind": "add", "amount": 1.0, "unit": "bits"},
        {"kind": "clamp", "lo": 2.0, "hi": 1.0, "unit": "coef"},
        {"kind": "clamp", "lo": math.nan, "hi": None, "unit": "coef"},
        {"kind": "clamp", "lo": None, "hi": None, "unit": "coef"},
        {"kind": "clamp", "lo": 1.0, "hi": None, "unit": 3},
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_other_json_is_refused(data):
    with pytest.raises(PlanError):
        operator_from_json(data)
