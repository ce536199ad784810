import math
import pickle

import pytest
import torch

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import HookPointError, InputError, VectorShapeError, VectorValueError
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet


def vector(*values, layer=1, **kwargs):
    return SteeringVector.from_tensor(torch.tensor(values or (3.0, 4.0)), layer=layer, **kwargs)


@pytest.mark.parametrize("shape", [(), (1,), (1, 4), (2, 4)])
def test_other_shapes_are_refused_with_the_shape_seen(shape):
    with pytest.raises(VectorShapeError) as caught:
        SteeringVector.from_tensor(torch.zeros(shape), layer=0)
    assert str(shape) in str(caught.value)


def test_a_number_made_by_indexing_is_explained():
    with pytest.raises(VectorShapeError, match=r"\[-1\]"):
        SteeringVector.from_tensor(torch.randn(576)[-1], layer=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(bad):
    with pytest.raises(VectorValueError, match="1 NaN or infinite"):
        vector(1.0, bad)


def test_values_are_a_float32_copy_on_the_cpu():
    source = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    v = SteeringVector.from_tensor(source, layer=0)
    with torch.no_grad():
        source.zero_()
    assert v.values.tolist() == [1, 2]
    assert v.values.dtype == torch.float32
    assert not v.values.requires_grad


def test_norm_and_unit():
    assert vector().norm == 5
    assert torch.allclose(vector().unit, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_extreme_lengths_still_have_a_direction(size):
    v = vector(3 * size, 4 * size)
    assert v.norm == pytest.approx(5 * size)
    assert v.unit.tolist() == pytest.approx([0.6, 0.8])


def test_a_zero_vector_has_no_direction():
    with pytest.raises(VectorValueError, match="zero"):
        _ = vector(0.0, 0.0).unit


def test_identity_is_values_and_place():
    assert vector() == vector(name="other name", model="other")
    assert len({vector(), vector()}) == 1
    assert vector() != vector(layer=2)
    assert vector() != vector(site="resid_pre")
    assert vector() != vector(3.0, 4.5)
    assert vector() != "vector"


def test_transformations_return_new_vectors():
    v = vector(name="joy")
    assert v.scaled(2.0).values.tolist() == [6, 8]
    assert v.values.tolist() == [3, 4]
    moved = v.at(5, "resid_pre")
    assert moved.hook_point == HookPoint(5, "resid_pre")
    assert moved.card.extracted_at == "blocks.1.hook_resid_post"
    other = v.with_values(torch.tensor([0.0, 1.0]), method="random")
    assert (other.card.method, other.card.name) == ("random", "joy: random")
    assert v.cosine(other) == pytest.approx(0.8)
    with pytest.raises(AttributeError):
        v.values = torch.zeros(2)


def test_a_moved_vectors_median_norm_is_forgotten():
    v = SteeringVector(torch.ones(2), HookPoint(1), VectorCard(extracted_at=HookPoint(1).name, median_norm=7.0))
    assert v.at(2).card.median_norm is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, "7", True])
@pytest.mark.usefixtures("unchecked_types")
def test_a_card_holds_a_usable_median_norm_or_none(bad):
    with pytest.raises(InputError, match="median_norm"):
        VectorCard(median_norm=bad)


def test_cards_ignore_unknown_entries():
    card = VectorCard.from_json({"name": "joy", "invented_later": 1})
    assert card.name == "joy"
    assert VectorCard.from_json(card.to_json()) == card


def test_pickles():
    assert pickle.loads(pickle.dumps(vector())) == vector()


# --- sets ---------------------------------------------------------------------------------------------------------


def test_a_set_maps_layers_to_vectors():
    vectors = VectorSet((vector(layer=7), vector(layer=3)))
    assert list(vectors) == [3, 7]
    assert vectors[7].layer == 7
    assert vectors[-1].layer == 7
    assert len(vectors) == 2
    with pytest.raises(HookPointError, match=r"layers here: \[3, 7\]"):
        vectors[4]


def test_a_set_answers_membership_like_any_mapping():
    vectors = VectorSet((vector(layer=3),))
    assert 3 in vectors
    assert 4 not in vectors
    assert vectors.get(4) is None
    assert vectors.get(3) == vector(layer=3)
    assert dict(vectors) == {3: vector(layer=3)}


def test_a_set_holds_each_layer_once_and_one_site():
    with pytest.raises(HookPointError, match="twice"):
        VectorSet((vector(), vector()))
    with pytest.raises(HookPointError, match="one site"):
        VectorSet((vector(layer=1), vector(layer=2, site="resid_pre")))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("layer", ["1", True, 1.0, None])
def test_a_set_is_indexed_by_layers(layer):
    vector = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
    with pytest.raises(HookPointError, match="indexed by a layer"):
        VectorSet((vector,))[layer]


def test_get_counts_layers_as_indexing_does():
    vectors = VectorSet((SteeringVector.from_tensor(torch.ones(2), layer=3),))
    assert vectors.get(-1) is vectors[-1]
    assert vectors.get(7) is None
