import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steerlab.measures._interactions import interaction_residuals

grids = arrays(np.float64, (3, 3, 4), elements=st.floats(-10, 10))


def test_worked_by_hand():
    # baseline in the middle of a, first of b: 10 − 4 − 3 + 1 = 4 and 5 − 2 − 3 + 1 = 1
    grid = np.array([[[2.0, 5.0], [1.0, 3.0], [4.0, 10.0]]])
    assert interaction_residuals(grid, 1, 0)[0].tolist() == [[0, 1], [0, 0], [0, 4]]


@given(grids)
def test_a_sum_of_parts_leaves_nothing(parts):
    additive = parts[:, :, :1] + parts[:, :1, :]
    assert np.allclose(interaction_residuals(additive, 2, 3), 0)


@given(grids)
def test_equals_the_double_difference(grid):
    found = interaction_residuals(grid, 0, 0)
    twice = np.cumsum(np.cumsum(np.diff(np.diff(grid, axis=1), axis=2), axis=1), axis=2)
    assert np.allclose(found[:, 1:, 1:], twice)
    assert np.allclose(found[:, 0], 0)
    assert np.allclose(found[:, :, 0], 0)
