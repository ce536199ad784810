import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerlab.measures.equal_cost import Crossing, first_crossing


def test_worked_by_hand():
    costs, values = np.array([0.0, 0.2, 0.6]), np.array([0.0, 1.0, 4.0])
    found = first_crossing(costs, 0.4)
    assert (found.index, found.weight) == (1, pytest.approx(0.5))
    assert first_crossing(costs, 0.2) == Crossing(0, 1.0)
    assert first_crossing(costs, 0.4).of(values) == pytest.approx(2.5)
    assert [float(first_crossing(costs, level).of(values)) for level in costs] == values.tolist()


def test_nothing_is_extrapolated():
    assert first_crossing(np.array([0.0, 0.2]), 0.21) is None
    assert first_crossing(np.array([0.0, -0.2]), 0.01) is None
    assert first_crossing(np.array([]), 0.0) is None


def test_a_cost_that_falls_first_is_followed_in_order():
    costs, values = np.array([0.0, -0.1, 0.1, 0.0, 0.3]), np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    assert float(first_crossing(costs, -0.05).of(values)) == pytest.approx(0.5)
    assert float(first_crossing(costs, 0.05).of(values)) == pytest.approx(1.75)  # not 2.5, where it falls again


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.floats(0, 1))
def test_a_rising_curve_is_numpys_interpolation(steps, share):
    costs = np.concatenate([[0.0], np.cumsum(steps)])
    values = np.sin(costs * 7)
    level = share * costs[-1]
    found = first_crossing(costs, level)
    assert found is not None
    assert float(found.of(values)) == pytest.approx(np.interp(level, costs, values), abs=1e-9)
