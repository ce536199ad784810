import math

import pytest

from steerlab.core.errors import PolicyError
from steerlab.core.policy import SamplingPolicy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", -0.5),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", math.inf),
    ],
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(PolicyError, match=name):
        SamplingPolicy(**{name: value})


def test_defaults_change_nothing():
    policy = SamplingPolicy()
    assert (policy.temperature, policy.top_p, policy.top_k, policy.min_p, policy.repetition_penalty) == (1, 1, 0, 0, 1)


def test_temperature_zero_is_greedy():
    assert SamplingPolicy(temperature=0).is_greedy
    assert SamplingPolicy.greedy() == SamplingPolicy(temperature=0.0)
    assert not SamplingPolicy(temperature=1e-3).is_greedy


def test_is_immutable():
    with pytest.raises(AttributeError):
        SamplingPolicy().temperature = 2.0
