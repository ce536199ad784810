import numpy as np
import pytest

from steerlab.core.errors import InputError
from steerlab.experiment.metrics import choice_prob, find_metric, log_prob_margin


def test_margin_is_the_difference_of_means() -> None:
    assert log_prob_margin(np.array([-1.0, -3.0]), np.array([-4.0])) == pytest.approx(2.0)


def test_choice_prob_is_a_share_and_survives_tiny_probabilities() -> None:
    positive, negative = np.log([0.2, 0.1]), np.log([0.1])
    assert choice_prob(positive, negative) == pytest.approx(0.75)
    assert choice_prob(positive - 2000, negative - 2000) == pytest.approx(0.75)


def test_a_function_is_its_own_metric() -> None:
    def spread(positive: np.ndarray, negative: np.ndarray) -> float:
        return float(positive.max() - negative.min())

    assert find_metric(spread) == ("spread", spread)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(InputError, match="log_prob_margin"):
        find_metric("margin")
