import functools
from collections.abc import Callable

import numpy as np
import pytest

from steerlab.core.errors import InputError
from steerlab.experiment.measurements.metrics import choice_prob, find_metric, log_prob_margin, metric_identity
from tests.forked import run_forked


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


@pytest.mark.parametrize("wrong", [lambda values: 0.0, lambda a, b, c: 0.0, lambda *, a, b: 0.0])
def test_a_function_of_other_arguments_is_refused(wrong: Callable[..., float]) -> None:
    with pytest.raises(InputError, match="A metric takes two arrays"):
        find_metric(wrong)


def test_a_function_of_two_arguments_may_have_more_with_defaults() -> None:
    assert find_metric(functools.partial(np.subtract, dtype=None))[0] == "partial"
    assert find_metric(lambda a, b, weight=1.0: 0.0)[0] == "<lambda>"


# --- which metric it was ------------------------------------------------------------------------------------------


def scaled_by(factor: float) -> Callable[[np.ndarray, np.ndarray], float]:
    def metric(positive: np.ndarray, negative: np.ndarray) -> float:
        return factor * float(positive.mean() - negative.mean())

    return metric


def with_default(positive: np.ndarray, negative: np.ndarray, factor: float = 1.0) -> float:
    return factor * float(positive.mean() - negative.mean())


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, positive: np.ndarray, negative: np.ndarray) -> float:
        return self.factor * float(positive.mean() - negative.mean())

    def method(self, positive: np.ndarray, negative: np.ndarray) -> float:
        return self(positive, negative)


def test_names_are_their_own_identity() -> None:
    assert metric_identity("choice_prob") == "choice_prob"
    assert metric_identity(choice_prob) != "choice_prob", "a function of that name may be another one"
    with pytest.raises(InputError, match="Unknown metric"):
        metric_identity("margin")


def test_functions_are_told_apart_by_what_they_compute() -> None:
    metrics = [
        lambda p, n: float(p.max()),
        lambda p, n: float(p.min()),
        *(lambda p, n: float(p[0]), lambda p, n: float(n[0])),  # of one line
        scaled_by(1.0),
        scaled_by(2.0),
        with_default,
        functools.partial(with_default, factor=2.0),
        functools.partial(with_default, factor=3.0),
        Scaled(1.0),
        Scaled(2.0),
        Scaled(1.0).method,
        Scaled(2.0).method,
        eval("lambda p, n: 1.0"),
        eval("lambda p, n: 2.0"),
        np.dot,
    ]
    identities = [metric_identity(metric) for metric in metrics]
    assert len(set(identities)) == len(metrics)


def test_the_same_function_keeps_its_identity() -> None:
    assert metric_identity(scaled_by(2.0)) == metric_identity(scaled_by(2.0))
    assert metric_identity(Scaled(2.0)) == metric_identity(Scaled(2.0))
    assert metric_identity(with_default).startswith("with_default#")


def identities() -> list[str]:
    return [metric_identity(metric) for metric in (with_default, scaled_by(2.0), Scaled(2.0))]


def test_an_identity_is_the_same_in_another_process() -> None:
    here = identities()
    assert run_forked(identities) == here
    assert here[0].startswith("with_default#")
