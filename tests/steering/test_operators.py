import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import steerlab as sl
from steerlab.core.errors import PlanError, VectorShapeError
from steerlab.steering.operators import Edit, Gate, Operator, Term, operator_from_json
from steerlab.steering.positions import where
from steerlab.steering.vectors import SteeringVector

V = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)  # unit (.6, .8)

streams = st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4).map(lambda x: torch.tensor(x).reshape(2, 2))


def delta(edit, *h, median=None):
    edit = edit if median is None else edit.with_median_norm(median)
    return edit.delta(torch.tensor([h])).flatten().tolist()


def applied(edit, h):
    return h + edit.delta(h)


# --- worked by hand -----------------------------------------------------------------------------------------------


def test_add_dose_adds_a_norm_in_units_of_the_median():
    assert delta(sl.add(V, dose=0.2), 5.0, 5.0, median=100.0) == pytest.approx([12, 16])
    long = sl.add(V.scaled(7.0), dose=0.2).with_median_norm(100.0)
    assert delta(long, 5.0, 5.0) == pytest.approx([12, 16])
    change, norm = long.constant_delta(torch.device("cpu"), torch.float32)
    assert (change.tolist(), norm) == (pytest.approx([12, 16]), pytest.approx(20))


def test_clamp_bounds_in_doses_are_multiples_of_the_median():
    assert delta(sl.clamp(V, hi=0.05, unit="dose"), 10.0, 0.0, median=100.0) == pytest.approx([-0.6, -0.8])
    assert delta(sl.clamp(V, lo=0.08, unit="dose"), 10.0, 0.0, median=100.0) == pytest.approx([1.2, 1.6])


def test_a_dose_without_a_median_is_an_error_not_a_nan():
    with pytest.raises(PlanError, match="median norm there is unknown"):
        delta(sl.add(V, dose=0.2), 1.0, 1.0)


# --- properties ---------------------------------------------------------------------------------------------------


@given(streams)
def test_a_clamp_that_holds_already_is_the_identity_to_the_bit(h):
    assert torch.equal(applied(sl.clamp(V, lo=-1000.0, hi=1000.0), h), h)


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
        sl.ablate(V, where="everywhere")


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


# --- set ----------------------------------------------------------------------------------------------------------


def test_set_makes_the_projection_the_target():
    # u·h = 6, wanted 8: Δ = 2 u
    assert delta(sl.set(V, 8.0), 10.0, 0.0) == pytest.approx([1.2, 1.6])
    assert delta(sl.set(V, coef=8.0), 10.0, 0.0) == pytest.approx([1.2, 1.6])
    assert delta(sl.set(V, dose=0.08), 10.0, 0.0, median=100.0) == pytest.approx([1.2, 1.6])


def test_a_reference_point_moves_the_origin_of_the_projection():
    # u·r = .6·5 + .8·0 = 3, so the projection becomes 8 + 3 = 11; it was 6, so Δ = 5 u
    r = SteeringVector.from_tensor(torch.tensor([5.0, 0.0]), layer=3)
    edit = sl.set(V, 8.0, reference=r)
    assert delta(edit, 10.0, 0.0) == pytest.approx([3.0, 4.0])
    assert float((applied(edit, torch.tensor([[10.0, 0.0]])) - r.values) @ V.unit) == pytest.approx(8.0)
    (term,) = edit.terms()
    assert (term.gate.amount, term.gate.slope) == pytest.approx((11.0, -1.0))


@pytest.mark.parametrize("strength", [{}, {"dose": 1.0, "coef": 1.0}, {"value": 1.0, "dose": 1.0}])
def test_set_takes_exactly_one_target(strength):
    with pytest.raises(PlanError, match="exactly one strength"):
        sl.set(V, **strength)


def test_set_with_value_and_coef_says_that_they_mean_the_same():
    with pytest.raises(PlanError, match="mean the same"):
        sl.set(V, 1.0, coef=1.0)


# --- rotate -------------------------------------------------------------------------------------------------------

E0 = SteeringVector.from_tensor(torch.tensor([2.0, 0.0, 0.0]), layer=1)
E1 = SteeringVector.from_tensor(torch.tensor([3.0, 5.0, 0.0]), layer=1)  # orthogonal to E0 it is the second axis


def test_sixty_degrees_by_hand():
    # (4, 2) turned by 60°: (4/2 − 2·√3/2, 4·√3/2 + 2/2) = (2 − √3, 2√3 + 1)
    expected = [2 - math.sqrt(3) - 4, 2 * math.sqrt(3) + 1 - 2, 0]
    assert delta(sl.rotate(E0, E1, angle=math.pi / 3), 4.0, 2.0, 7.0) == pytest.approx(expected, abs=1e-5)


@given(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), st.floats(-7, 7), st.floats(-7, 7))
def test_rotations_keep_norms_and_add_up(values, first, second):
    h = torch.tensor([values])
    once = applied(sl.rotate(E0, E1, angle=first), h)
    torch.testing.assert_close(once.norm(), h.norm(), atol=1e-3, rtol=1e-5)
    assert once[0, 2] == h[0, 2]
    twice = applied(sl.rotate(E0, E1, angle=second), once)
    torch.testing.assert_close(twice, applied(sl.rotate(E0, E1, angle=first + second), h), atol=2e-3, rtol=1e-4)


def test_a_rotation_needs_a_plane():
    with pytest.raises(PlanError, match="parallel"):
        sl.rotate(E0, E0.scaled(-3.0), angle=1.0)
    with pytest.raises(VectorShapeError, match=r"\[3\] and \[2\]"):
        sl.rotate(E0, V, angle=1.0)


def test_a_rotation_is_a_sum_of_four_terms_that_read_the_same_stream():
    terms = sl.rotate(E0, E1, angle=1.0).terms()
    h = torch.tensor([[4.0, 2.0, 7.0]])
    once = h + sum(term(h) for term in terms)
    torch.testing.assert_close(once, applied(sl.rotate(E0, E1, angle=1.0), h))
    assert once.norm() == pytest.approx(float(h.norm()))


# --- norm="keep" --------------------------------------------------------------------------------------------------


def test_norm_keep_by_hand():
    # (3, 0) + (0, 4) = (3, 4), scaled from norm 5 to norm 3: (1.8, 2.4)
    up = SteeringVector.from_tensor(torch.tensor([0.0, 4.0]), layer=1)
    assert delta(sl.add(up, coef=1.0, norm="keep"), 3.0, 0.0) == pytest.approx([-1.2, 2.4])


@given(streams, st.floats(-3, 3))
def test_the_norm_is_kept_at_every_scale_and_scale_zero_changes_nothing(h, scale):
    edit = sl.add(V, coef=1.5, norm="keep")
    kept = applied(edit.scaled(scale), h)
    direct = h + 1.5 * scale * V.values
    if (direct.norm(dim=-1) > 1e-2).all():
        torch.testing.assert_close(kept.norm(dim=-1), h.norm(dim=-1), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(applied(edit.scaled(0.0), h), h, atol=0, rtol=0)


def test_norm_keep_makes_an_addition_depend_on_the_stream(unchecked_types):
    edit = sl.add(V, coef=1.0, norm="keep")
    assert edit.constant_delta(torch.device("cpu"), torch.float32) is None
    with pytest.raises(PlanError, match="norm is 'keep' or None"):
        sl.add(V, coef=1.0, norm="keeps")


# --- the form that all share --------------------------------------------------------------------------------------


@given(streams, st.floats(-20, 20))
def test_terms_equal_each_operators_definition(h, value):
    p, u = h @ V.unit, V.unit
    r = SteeringVector.from_tensor(torch.tensor([5.0, -2.0]), layer=1)
    expected = [
        (sl.add(V, coef=value), (value * V.values).expand_as(h)),
        (sl.ablate(V), -p[:, None] * u),
        (sl.clamp(V, -3.0, 8.0), (p.clamp(-3.0, 8.0) - p)[:, None] * u),
        (sl.set(V, value), (value - p)[:, None] * u),
        (sl.set(V, value, reference=r), (value + r.values @ u - p)[:, None] * u),
    ]
    for edit, change in expected:
        torch.testing.assert_close(edit.delta(h).expand_as(h), change, atol=1e-3, rtol=1e-4)
        summed = sum(term(h) for term in edit.terms()) + torch.zeros_like(h)
        torch.testing.assert_close(summed, change, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (Gate(3.0), [3, 3, 3, 3]),
        (Gate(slope=2.0), [-4, 0, 2, 10]),
        (Gate(gain=1.0, lo=0.0), [0, 0, 1, 5]),
        (Gate(gain=1.0, lo=0.0, hi=2.0, slope=-1.0), [2, 0, 0, -3]),
        (Gate(8.0, slope=-1.0, threshold=0.5), [0, 0, 7, 3]),
    ],
    ids=["constant", "linear", "relu", "clamp", "only where active"],
)
def test_gates_by_hand(gate, expected):
    assert gate(torch.tensor([-2.0, 0.0, 1.0, 5.0])).tolist() == expected
    assert gate.is_constant == (expected[0] == 3)


def test_a_term_reads_along_one_direction_and_writes_along_another():
    # z = 1·2 + 3·1 − 1 = 4, relu(4)·(0, 2) = (0, 8); z = −5: nothing
    term = Term(torch.tensor([0.0, 2.0]), Gate(gain=1.0, lo=0.0), torch.tensor([2.0, 1.0]), bias=-1.0)
    assert term(torch.tensor([[1.0, 3.0], [-2.0, 0.0]])).tolist() == [[0, 8], [0, 0]]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("convert", [Tensor.double, Tensor.bfloat16, lambda t: t.double().numpy()])
def test_a_terms_directions_may_be_of_any_float(convert):
    along, h = torch.tensor([2.0, 1.0]), torch.tensor([[1.0, 3.0]])
    found = Term(convert(along), Gate(slope=1.0), convert(along))(h)
    assert found.dtype == torch.float32
    assert found.tolist() == [[10.0, 5.0]]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Term([1.0, 2.0], Gate(1.0)), "write is a tensor along the stream"),
        (lambda: Term(None, Gate(1.0)), "write is a tensor along the stream"),
        (lambda: Term(V.unit, Gate(slope=1.0), "up"), "read is a tensor along the stream"),
        (lambda: Gate(slope=math.nan), "slope of a gate is a number"),
        (lambda: Gate(math.inf), "amount of a gate is a number"),
        (lambda: Gate(gain=1.0, lo=2.0, hi=1.0), "lo ≤ hi"),
        (lambda: Term(V.unit, Gate(slope=1.0)), "give it a direction"),
        (lambda: Term(V.unit, Gate(1.0), bias=math.nan), "bias of a term"),
    ],
)
def test_forms_that_mean_nothing_are_refused(make, words):
    with pytest.raises(PlanError, match=words):
        make()


class Own(Operator):
    """States what `made` is as its terms."""

    unit = "coef"

    def __init__(self, made):
        self.made = made

    def terms(self, along):
        return self.made(along)

    def to_json(self):
        return {"kind": "own"}


def test_an_operator_of_ones_own_needs_its_terms_only():
    edit = Edit(Own(lambda along: (Term(along.unit, Gate(slope=-2.0), along.unit),)), V, sl.where.all())
    h = torch.tensor([[10.0, 0.0]])
    assert edit.operator.has_formula
    torch.testing.assert_close(edit.delta(h), 2 * sl.ablate(V).delta(h))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda along: (), "one or more Terms"),
        (lambda along: Term(along.unit, Gate(1.0)), "one or more Terms"),
        (lambda along: (Term(torch.ones(3), Gate(1.0)),), r"shape \[3\]; the stream has \[2\]"),
    ],
)
def test_terms_of_another_kind_are_refused(made, words):
    with pytest.raises(PlanError, match=words):
        Edit(Own(made), V, sl.where.all()).delta(torch.ones(1, 2))


def test_a_strength_without_its_unit_is_refused_with_both_names():
    with pytest.raises(PlanError, match=r"dose= .* or coef="):
        sl.add(V, 0.2)
