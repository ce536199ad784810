import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steerlab.measures.ratings import expected_aggregate, harmonic_mean, mean, rating_entropy, rating_probs


def test_a_label_that_another_one_begins_with_counts_without_it():
    # "1" 0.5, of which "10" 0.2, of which "100" 0.05; "2" 0.1
    probs, mass = rating_probs(np.log([0.5, 0.2, 0.05, 0.1]), [[1], [1, 0], [1, 0, 0], [2]])
    assert mass == pytest.approx(0.6)
    assert probs * mass == pytest.approx([0.3, 0.15, 0.05, 0.1])


def test_tiny_probabilities_do_not_vanish():
    probs, mass = rating_probs(np.array([-900.0, -901.0]), [[1], [2]])
    assert probs == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])
    assert mass == 0.0  # it is below the smallest float; the shares are not


def test_labels_of_the_same_tokens_are_refused():
    with pytest.raises(ValueError, match="same tokens"):
        rating_probs(np.log([0.1, 0.1]), [[1], [1]])


@given(st.integers(0, 10_000), st.integers(1, 3))
def test_probabilities_of_a_random_process_are_found(seed, depth):
    """A process that writes digits 0 and 1 and stops with some chance: the labels are its texts, by enumeration."""
    draws = np.random.default_rng(seed)
    chance = {}  # of each prefix, that the process writes at least these digits
    for length in range(1, depth + 1):
        for text in itertools.product((0, 1), repeat=length):
            chance[text] = chance.get(text[:-1], 1.0) * draws.uniform(0.05, 0.45)
    labels = list(chance)
    probs, mass = rating_probs(np.log([chance[label] for label in labels]), labels)
    exact = [chance[t] - sum(chance.get((*t, digit), 0.0) for digit in (0, 1)) for t in labels]
    assert probs.sum() == pytest.approx(1)
    assert probs * mass == pytest.approx(exact)


def test_entropy_is_scipys():
    probs = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    assert rating_entropy(probs) == pytest.approx(stats.entropy(probs, axis=1))


def test_harmonic_mean_is_scipys_and_0_if_any_part_is():
    ratings = np.random.default_rng(0).uniform(0.1, 2, (5, 3))
    assert harmonic_mean(ratings) == pytest.approx(stats.hmean(ratings, axis=1))
    assert harmonic_mean(np.array([2.0, 0.0, 2.0])) == 0.0
    with pytest.raises(ValueError, match="negative"):
        harmonic_mean(np.array([1.0, -1.0]))


def test_an_expected_aggregate_is_the_mean_of_draws():
    draws = np.random.default_rng(1)
    probs, values = draws.dirichlet([1, 1, 1], (2, 3)), np.array([0.0, 1.0, 2.0])
    exact = expected_aggregate(probs, values, harmonic_mean)
    for row, distributions in enumerate(probs):
        drawn = np.stack([draws.choice(values, 40_000, p=p) for p in distributions], axis=1)
        assert exact[row] == pytest.approx(harmonic_mean(drawn).mean(), abs=0.02)
    assert expected_aggregate(probs, values, mean) == pytest.approx((probs @ values).mean(axis=1))


def test_too_many_combinations_are_refused():
    with pytest.raises(ValueError, match="combinations"):
        expected_aggregate(np.full((1, 6, 10), 0.1), np.arange(10.0), harmonic_mean)
