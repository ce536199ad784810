"""Sums, multiples and projections of vectors: the values, the names, and what does not go together."""

import numpy as np
import pytest
import torch

import steerlab as sl


def vector(values, name=None, layer=1, **card):
    made = sl.SteeringVector.from_tensor(values, layer=layer, name=name)
    return type(made)(made.values, made.hook_point, type(made.card)(**{**made.card.to_json(), **card}))


V, W = vector([3.0, 4.0], "joy", weights_hash="x", model="m"), vector([1.0, -1.0], "awe", weights_hash="x", model="m")


@pytest.mark.parametrize(
    ("made", "values", "name"),
    [
        (V + W, [4.0, 3.0], "joy + awe"),
        (V - W, [2.0, 5.0], "joy − awe"),
        (-V, [-3.0, -4.0], "−joy"),
        (2 * V, [6.0, 8.0], "2 × joy"),
        (V * 0.5, [1.5, 2.0], "0.5 × joy"),
        (np.float64(2) * V, [6.0, 8.0], "2 × joy"),
        (torch.tensor(2.0) * V, [6.0, 8.0], "2 × joy"),
        (2 * (V + W), [8.0, 6.0], "2 × (joy + awe)"),
        (V.project_out(W), [3.5, 3.5], "joy without awe"),
    ],
)
def test_values_and_names(made, values, name):
    assert made.values.tolist() == pytest.approx(values)
    assert made.name == name
    assert made.hook_point == V.hook_point
    assert (made.card.model, made.card.weights_hash) == ("m", "x")


def test_what_two_cards_disagree_on_is_unknown():
    summed = vector([1.0, 0.0], model="m", n_pairs=3, median_norm=2.0) + vector(
        [0.0, 1.0], model="m", n_pairs=4, median_norm=2.0
    )
    assert (summed.card.model, summed.card.n_pairs, summed.card.median_norm) == ("m", None, 2.0)
    assert summed.name == "a vector + a vector"


def test_nothing_along_several_directions_is_left():
    draws = torch.Generator().manual_seed(0)
    v, *others = (vector(torch.randn(16, generator=draws)) for _ in range(4))
    left = v.project_out(*others)
    assert max(abs(left.cosine(other)) for other in others) < 1e-6
    assert left.norm < v.norm
    with pytest.raises(sl.VectorValueError, match="nothing is left"):
        v.project_out(v + others[0], others[0])


@pytest.mark.parametrize(
    ("other", "error", "sentence"),
    [
        (vector([1.0, 2.0], layer=2), sl.HookPointError, r"\.at\(layer\)"),
        (vector([1.0, 2.0, 3.0]), sl.VectorMismatchError, "widths 2 and 3"),
        (vector([1.0, 2.0], weights_hash="y", model="n"), sl.VectorMismatchError, "of m and .* of n"),
    ],
)
def test_what_does_not_go_together_is_refused(other, error, sentence):
    for combine in (lambda: V + other, lambda: V - other, lambda: V.project_out(other)):
        with pytest.raises(error, match=sentence):
            combine()


@pytest.mark.usefixtures("unchecked_types")
def test_other_things_are_no_vectors():
    with pytest.raises(TypeError):
        V + 1
    with pytest.raises(sl.VectorValueError):
        V * "2"


def test_a_mean_says_of_which():
    v, w = (sl.SteeringVector.from_tensor(t, layer=1, name=n) for t, n in (([3.0, 4.0], "v"), ([1.0, 0.0], "w")))
    found = sl.SteeringVector.mean([v, w, v + w])
    assert found.values.tolist() == pytest.approx([8 / 3, 8 / 3])
    assert (found.name, found.card.method) == ("mean of v, w, (v + w)", "mean")
    with pytest.raises(sl.InputError, match="none"):
        sl.SteeringVector.mean([])
    with pytest.raises(sl.HookPointError, match="one hook point"):
        sl.SteeringVector.mean([v, w.at(2)])


def test_cosines_of_a_set_are_a_matrix():
    vectors = sl.VectorSet(
        tuple(sl.SteeringVector.from_tensor(t, layer=k) for k, t in enumerate([[1.0, 0.0], [3.0, 4.0], [0.0, -2.0]]))
    )
    found = vectors.cosines()
    assert found.values.tolist() == pytest.approx(torch.tensor([[1, 0.6, 0], [0.6, 1, -0.8], [0, -0.8, 1]]))
    assert found.to_frame().loc["layer 1", "layer 2"] == pytest.approx(-0.8)
    assert repr(found) == "CosineMatrix(3 × 3, from −0.800 to 0.600)"
    assert "−0.80" in found._repr_html_()
    other = sl.VectorSet((sl.SteeringVector.from_tensor([1.0, 0.0], layer=7, name="x"),))
    assert vectors.cosines(other).values.shape == (3, 1)
    with pytest.raises(sl.VectorMismatchError, match="widths"):
        vectors.cosines(sl.VectorSet((sl.SteeringVector.from_tensor([1.0, 2.0, 3.0], layer=0),)))
