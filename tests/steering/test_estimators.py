import pytest
import torch

from steerlab.core.errors import InputError
from steerlab.steering.estimators import estimator, mean_diff


def test_mean_diff_worked_by_hand():
    positive = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    negative = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    assert mean_diff(positive, negative).tolist() == [1.0, 4.0]
    assert mean_diff(negative, positive).tolist() == [-1.0, -4.0]


def test_small_differences_of_large_activations_survive():
    base = torch.full((4096, 2), 3e4)
    values = mean_diff(base + torch.tensor([0.5, 0.0]), base)
    assert values.tolist() == [0.5, 0.0]


def test_unknown_methods_name_the_known():
    assert estimator("mean_diff") is mean_diff
    with pytest.raises(InputError, match="known: mean_diff"):
        estimator("magic")
