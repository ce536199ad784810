import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import log_expit
from sklearn.covariance import oas
from sklearn.decomposition import PCA

from steerlab.core.errors import InputError, VectorValueError
from steerlab.steering.extraction._axes import Chunk, shrunk
from steerlab.steering.extraction.estimators import (
    ESTIMATORS,
    KEEPS_LENGTH,
    METHODS,
    Estimate,
    estimate,
    estimator,
    mean_diff,
    random_pairs,
)

PAIRED = [method for method in METHODS if method != "lat"]
DIRECTIONS = [method for method in METHODS if method not in KEEPS_LENGTH]


def rows(n, d=6, n_layers=2, seed=0):
    """Positive and negative rows that differ along the first coordinate, with correlated noise."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator) / d**0.5 + torch.eye(d)
    both = torch.randn(2, n_layers, n, d, generator=generator) @ mix + 1
    both[0, :, :, 0] += 1.5
    return both[0], both[1]


def cosine(a, b):
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return float(a @ b / a.norm() / b.norm())


# --- by hand ------------------------------------------------------------------------------------------------------


def test_mean_diff_worked_by_hand():
    positive = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    negative = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    assert mean_diff(positive, negative).tolist() == [1.0, 4.0]
    assert mean_diff(negative, positive).tolist() == [-1.0, -4.0]


def test_small_differences_of_large_activations_survive():
    base = torch.full((4096, 2), 3e4)
    values = mean_diff(base + torch.tensor([0.5, 0.0]), base)
    assert values.tolist() == [0.5, 0.0]


def test_principal_axes_worked_by_hand():
    negative = torch.tensor([[[7.0, 1.0], [0.0, 4.0]]])
    differences = torch.tensor([[[-3.0, 1.0], [-3.0, -1.0]]])
    assert estimate("pca_uncentred", negative + differences, negative)[0].tolist() == pytest.approx([-1, 0], abs=1e-7)
    centred = estimate("pca_centred", negative + differences, negative)[0]
    assert centred.abs().tolist() == pytest.approx([0, 1], abs=1e-7)


# --- against other implementations --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 40])
def test_centred_axis_is_that_of_scikit_learn(n):
    positive, negative = rows(n)
    for layer, found in enumerate(estimate("pca_centred", positive, negative)):
        reference = PCA(1).fit((positive - negative)[layer].double().numpy()).components_[0]
        assert abs(cosine(found, reference)) > 1 - 1e-9


@pytest.mark.parametrize("n", [4, 40])
def test_uncentred_axis_is_the_first_singular_vector(n):
    positive, negative = rows(n)
    for layer, found in enumerate(estimate("pca_uncentred", positive, negative)):
        reference = np.linalg.svd((positive - negative)[layer].double().numpy())[2][0]
        assert abs(cosine(found, reference)) > 1 - 1e-9


@pytest.mark.parametrize("n", [3, 10, 100])
def test_shrinkage_is_that_of_scikit_learn(n):
    values = rows(n)[0][0].double().numpy()
    centred = values - values.mean(axis=0)
    expected, _ = oas(centred, assume_centered=True)
    found = shrunk(torch.from_numpy(centred.T @ centred / n), n)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [5, 60])
def test_lda_is_the_discriminant_of_scaled_rows(n):
    positive, negative = (side.double().numpy() for side in rows(n))
    for layer, found in enumerate(estimate("lda", *rows(n))):
        sides = [positive[layer], negative[layer]]
        within = np.concatenate([side - side.mean(axis=0) for side in sides])
        scale = within.std(axis=0)
        covariance, _ = oas(within / scale, assume_centered=True)
        difference = (sides[0].mean(axis=0) - sides[1].mean(axis=0)) / scale
        assert cosine(found, np.linalg.solve(covariance, difference) / scale) > 1 - 1e-9


def test_logistic_weights_minimise_the_penalised_loss():
    positive, negative = rows(30, d=4, n_layers=1)
    both = torch.cat([positive[0], negative[0]]).double().numpy()
    scaled = (both - both.mean(axis=0)) / both.std(axis=0)
    side = np.repeat([1.0, -1.0], 30)

    def loss(parameters):
        return parameters[:4] @ parameters[:4] / 2 - log_expit(side * (scaled @ parameters[:4] + parameters[4])).sum()

    weights = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-8}).x[:4]
    assert cosine(estimate("logistic", positive, negative)[0], weights / both.std(axis=0)) > 1 - 1e-6


def test_lat_is_the_axis_of_differences_between_random_pairs():
    positive, negative = rows(20)
    first, second = random_pairs(20, seed=5)
    assert sorted(first + second) == list(range(40))
    pooled = torch.cat([positive, negative], dim=1)
    for layer, found in enumerate(estimate("lat", positive, negative, seed=5)):
        differences = (pooled[layer, first] - pooled[layer, second]).double().numpy()
        assert abs(cosine(found, PCA(1).fit(differences).components_[0])) > 1 - 1e-9
    assert not torch.equal(estimate("lat", positive, negative, seed=5), estimate("lat", positive, negative, seed=6))


# --- properties ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PAIRED)
@given(st.integers(1, 3), st.integers(2, 18), st.integers(0, 5))
def test_chunks_do_not_matter(method, size, n, seed):
    positive, negative = rows(n, seed=seed)
    whole, cut = Estimate(method), Estimate(method)
    whole.add(Chunk.of_pairs(positive, negative))
    for start in range(0, n, size):
        cut.add(Chunk.of_pairs(positive[:, start : start + size], negative[:, start : start + size]))
    torch.testing.assert_close(cut.vectors(), whole.vectors(), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
@given(st.integers(4, 20), st.integers(0, 5))
def test_vectors_point_from_negative_to_positive(method, n, seed):
    positive, negative = rows(n, seed=seed)
    found = estimate(method, positive, negative)
    assert ((found * (positive - negative).mean(dim=1)).sum(dim=1) >= 0).all()
    if method != "lat":
        torch.testing.assert_close(estimate(method, negative, positive), -found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", DIRECTIONS)
def test_directions_have_length_one(method):
    assert estimate(method, *rows(12)).norm(dim=1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("method", METHODS)
def test_layers_do_not_mix(method):
    positive, negative = rows(15, n_layers=3)
    together = estimate(method, positive, negative)
    for layer in range(3):
        alone = estimator(method)(positive[layer], negative[layer])
        torch.testing.assert_close(alone, together[layer], rtol=1e-5, atol=1e-6)


# --- what cannot be estimated -------------------------------------------------------------------------------------


def checked(method, positive, negative, layers):
    found = Estimate(method)
    found.add(Chunk.of_pairs(positive, negative))
    found.check(layers)
    found.check_axes(found.vectors(), layers)


@pytest.mark.parametrize("method", PAIRED)
def test_the_same_activations_on_both_sides_name_the_layers(method):
    positive, negative = rows(5, n_layers=3)
    negative[1] = positive[1]
    with pytest.raises(VectorValueError, match=r"same at layers \[14\]"):
        checked(method, positive, negative, [7, 14, 21])


def test_differences_that_cancel_name_the_layers():
    positive, negative = rows(5)
    both = torch.cat([positive, negative], dim=1), torch.cat([negative, positive], dim=1)
    with pytest.raises(VectorValueError, match=r"cancel to zero at layers \[7, 14\]"):
        checked("pca_uncentred", *both, [7, 14])


def test_one_difference_has_no_centred_axis():
    positive, negative = rows(1)
    with pytest.raises(VectorValueError, match=r"do not vary at layers \[7, 14\]"):
        checked("pca_centred", positive, negative, [7, 14])


def test_one_pair_has_no_discriminant():
    positive, negative = rows(1)
    with pytest.raises(VectorValueError, match=r"do not vary at layers \[7, 14\], so lda has no axis"):
        checked("lda", positive, negative, [7, 14])


def test_unknown_methods_name_the_known():
    assert estimator("mean_diff") is mean_diff
    with pytest.raises(InputError, match="known: mean_diff, act_add, pca_uncentred"):
        estimator("magic")


def test_flipped_labels_are_a_null_for_some_methods_only():
    positive, negative = rows(40)
    flip = (torch.arange(40) % 2 == 0)[None, :, None]
    flipped = torch.where(flip, negative, positive), torch.where(flip, positive, negative)
    assert set(ESTIMATORS) == {"mean_diff", "logistic", "lda"}
    for method in METHODS:
        axis = abs(cosine(estimate(method, *flipped)[0], estimate(method, positive, negative)[0]))
        if method in ESTIMATORS:
            assert axis < 0.7
        if method == "pca_uncentred":
            assert axis > 0.999
