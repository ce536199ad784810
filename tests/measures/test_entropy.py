import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core.policy import SamplingPolicy
from steerlab.measures import entropy, nucleus, rb_entropy

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]])


def test_worked_case():
    assert rb_entropy(P.log(), SamplingPolicy(temperature=0.7)).item() == pytest.approx(0.9903, abs=5e-5)


def test_equals_scipy():
    p = torch.rand(6, 20, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(entropy(p.log()), torch.tensor(scipy.stats.entropy(p.numpy(), axis=-1)))


def test_is_the_entropy_over_the_nucleus():
    expected = scipy.stats.entropy([0.5 / 0.8, 0.3 / 0.8])
    assert rb_entropy(P.log(), SamplingPolicy(top_p=0.7)).item() == pytest.approx(expected, abs=1e-6)


def test_point_masses_have_none():
    assert rb_entropy(P.log(), SamplingPolicy.greedy()).item() == 0
    assert rb_entropy(P.log(), SamplingPolicy(top_k=1)).item() == 0
    assert entropy(torch.tensor([[0.0, -math.inf, -math.inf]])).item() == 0


@pytest.mark.parametrize("shift", [1e4, -1e4, 1e8])
def test_a_shift_changes_nothing(shift):
    logits = torch.randn(3, 40, dtype=torch.float64)
    torch.testing.assert_close(entropy(logits + shift), entropy(logits), atol=1e-6, rtol=0)
    exact = torch.tensor([[0.0, 1.0, 2.0, 3.0]])  # float32 holds these beside 10⁴ without rounding
    if abs(shift) == 1e4:
        assert entropy(exact + shift).item() == pytest.approx(entropy(exact).item(), abs=1e-6)


def test_minus_infinite_logits_give_no_nan():
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    for policy in (SamplingPolicy(), SamplingPolicy(temperature=0.5, top_p=0.9), SamplingPolicy(top_k=3)):
        assert rb_entropy(logits, policy).item() == pytest.approx(math.log(2), abs=1e-6)


def test_wider_computation_on_the_same_set():
    logits = 5 * torch.randn(4, 200)
    policy = SamplingPolicy(temperature=0.8, top_p=0.9)
    wide = rb_entropy(logits, policy, dtype=torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), rb_entropy(logits, policy), atol=1e-5, rtol=0)


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=25), st.floats(0.1, 4), st.floats(0.05, 1))
def test_between_zero_and_the_log_of_the_sets_size(row, temperature, top_p):
    logits, policy = torch.tensor([row]), SamplingPolicy(temperature=temperature, top_p=top_p)
    value = rb_entropy(logits, policy).item()
    assert 0 <= value <= math.log(int(nucleus(logits, policy).sum())) + 1e-5
