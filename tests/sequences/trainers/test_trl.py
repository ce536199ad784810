"""The callback's arithmetic by hand; a real run is in tests/peers/test_trl_callback.py."""

import math

import numpy as np
import pytest

from steerlab.core.errors import InputError
from steerlab.sequences.trainers.trl import PolicyEntropyCallback, _effective_share, _Scored, _summary


def test_the_summary_by_hand():
    log_qs = np.log([[0.5, 0.25, 1.0], [0.2, 1.0, 1.0]])
    drawn = np.array([[True, True, False], [True, False, False]])
    scored = _Scored(log_qs, np.array([[1.0, 2, 9], [3, 9, 9]]), np.array([[4.0, 6, 9], [8, 9, 9]]), drawn)
    before = np.log([[0.5, 0.5, 1.0], [0.19, 1.0, 1.0]])
    found = _summary([scored], [before])
    assert found["rb_entropy"] == 2
    assert found["support_size"] == 6
    assert found["naive_entropy"] == pytest.approx(-np.log([0.5, 0.25, 0.2]).mean())
    assert found["ratio_outside"] == pytest.approx(1 / 3)  # 1, 0.5, 1.05
    weights = np.array([0.5, 0.2 / 0.19])
    assert found["ratio_ess"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 2)
    assert found["outside_nucleus"] == 0


def test_a_token_outside_the_nucleus():
    log_qs = np.array([[-math.inf, math.log(0.5)]])
    scored = _Scored(log_qs, np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2), dtype=bool))
    found = _summary([scored], [np.log([[0.5, 0.5]])])
    assert found["outside_nucleus"] == 0.5
    assert found["ratio_outside"] == 0.5
    assert found["naive_entropy"] == pytest.approx(math.log(2))
    assert math.isnan(found["ratio_ess"])


def test_effective_share():
    assert _effective_share(np.zeros(5)) == 1
    assert _effective_share(np.array([0.0, -np.inf])) == 0.5


def test_other_trainers_are_refused():
    with pytest.raises(InputError, match="object buffers no responses"):
        PolicyEntropyCallback(object())
