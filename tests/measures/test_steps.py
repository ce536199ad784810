import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core.policy import SamplingPolicy
from steerlab.measures import chosen_log_probs, log_q, nucleus, rb_entropy
from steerlab.measures.steps import policy_steps, policy_steps_gradient

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
POLICIES = [
    SamplingPolicy(),
    SamplingPolicy(temperature=0.6),
    SamplingPolicy(top_p=0.8),
    SamplingPolicy(temperature=1.7, top_p=0.6, top_k=9, min_p=0.01),
    SamplingPolicy.greedy(),
]
policies = st.builds(SamplingPolicy, temperature=st.one_of(st.just(0.0), st.floats(0.1, 4)), top_p=st.floats(0.05, 1))


def rows(n=6, vocabulary=30, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, vocabulary, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, vocabulary, (n,), generator=generator)


def test_worked_case():
    steps = policy_steps(P.log(), torch.tensor([1]), SamplingPolicy(temperature=0.7))
    assert steps.log_qs.item() == pytest.approx(-1.2594, abs=5e-5)
    assert steps.log_probs.item() == pytest.approx(math.log(0.3), abs=1e-6)
    assert steps.entropies.item() == pytest.approx(0.9903, abs=5e-5)


def test_worked_shape():
    logits = P.log() + 3
    shape = policy_steps(
        logits, torch.tensor([0]), SamplingPolicy(top_p=0.7), with_shape=True, eos_ids=torch.tensor([1, 3])
    ).shape
    assert shape is not None
    q = np.array([0.5, 0.3]) / 0.8
    a = np.log([0.5, 0.3]) + 3
    expected = {
        "head_mass": 0.8,
        "tail_mass": 0.2,
        "two_point_entropy": scipy.stats.entropy([0.8, 0.2]),
        "top1_prob": q[0],
        "margin": math.log(0.5 / 0.3),
        "collision": (q**2).sum(),
        "renyi2": -math.log((q**2).sum()),
        "effective_support": math.exp(scipy.stats.entropy(q)),
        "support_size": 2,
        "logit_mean": (q * a).sum(),
        "logit_var": (q * (a - (q * a).sum()) ** 2).sum(),
        "eos_prob": q[1],
    }
    found = {name: getattr(shape, name).item() for name in expected}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_separate_measures(policy, dtype):
    logits, tokens = rows(dtype=dtype)
    steps = policy_steps(logits, tokens, policy)
    torch.testing.assert_close(steps.log_probs, chosen_log_probs(logits, tokens))
    torch.testing.assert_close(steps.log_qs, log_q(logits, tokens, policy))
    torch.testing.assert_close(steps.entropies, rb_entropy(logits, policy), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shape_belongs_to_the_same_nucleus(policy):
    logits, tokens = rows()
    shape = policy_steps(logits, tokens, policy, with_shape=True).shape
    assert shape is not None
    inside = nucleus(logits, policy)
    p = (logits / (policy.temperature or 1.0)).softmax(-1)
    torch.testing.assert_close(shape.support_size, inside.sum(-1).double())
    torch.testing.assert_close(shape.head_mass, (p * inside).sum(-1))
    torch.testing.assert_close(shape.tail_mass, (p * ~inside).sum(-1))
    q = p * inside / (p * inside).sum(-1, keepdim=True)
    torch.testing.assert_close(shape.collision, (q**2).sum(-1))
    torch.testing.assert_close(shape.effective_support, torch.tensor(scipy.stats.entropy(q.numpy(), axis=-1)).exp())
    assert shape.eos_prob.isnan().all()


def test_a_tiny_tail_is_not_lost_in_one_minus_the_head():
    logits = torch.tensor([[0.0, -25.0, -26.0]])
    shape = policy_steps(logits, torch.tensor([0]), SamplingPolicy(top_p=0.9), with_shape=True).shape
    assert shape is not None
    assert shape.tail_mass.item() == pytest.approx(math.exp(-25) + math.exp(-26), rel=1e-5)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_shift_changes_nothing(shift):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for policy in POLICIES:
        before = policy_steps(logits, torch.tensor([3]), policy, with_shape=True)
        after = policy_steps(logits + shift, torch.tensor([3]), policy, with_shape=True)
        assert after.log_probs.item() <= 0
        torch.testing.assert_close(after.entropies, before.entropies, atol=1e-6, rtol=0)
        torch.testing.assert_close(after.shape.logit_var, before.shape.logit_var, atol=1e-5, rtol=0)


def test_impossible_tokens_give_no_nan():
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    for policy in POLICIES:
        steps = policy_steps(logits, torch.tensor([1]), policy, with_shape=True)
        assert steps.log_probs.item() == steps.log_qs.item() == -math.inf
        for name in ("head_mass", "tail_mass", "logit_mean", "logit_var", "collision", "support_size"):
            assert getattr(steps.shape, name).isfinite().all()
    assert policy_steps(logits, torch.tensor([0]), SamplingPolicy()).entropies.item() == pytest.approx(math.log(2))


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=25), policies, st.integers(0, 24), st.booleans())
def test_properties(row, policy, token, wide):
    logits, tokens = torch.tensor([row]), torch.tensor([token % len(row)])
    steps = policy_steps(logits, tokens, policy, dtype=torch.float64 if wide else None, with_shape=True)
    shape = steps.shape
    assert shape is not None
    assert steps.log_probs.item() <= 1e-6
    assert steps.log_qs.item() <= 1e-6
    assert 0 <= steps.entropies.item() <= math.log(shape.support_size.item()) + 1e-5
    assert shape.head_mass.item() + shape.tail_mass.item() == pytest.approx(1, abs=1e-5)
    assert shape.renyi2.item() <= steps.entropies.item() + 1e-5  # Rényi entropies fall with their order
    assert shape.logit_var.item() >= 0


@pytest.mark.parametrize("policy", POLICIES)
def test_gradient_equals_autograd(policy):
    logits, tokens = rows()
    tokens[0] = logits[0].argmin()  # outside most nuclei
    weights = [
        torch.randn(len(logits), dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(3)
    ]
    leaf = logits.clone().requires_grad_()
    q = log_q(leaf, tokens, policy)
    inside = q.isfinite()
    entropies = rb_entropy(leaf, policy) if not policy.is_greedy else torch.zeros(len(leaf), dtype=torch.float64)
    total = (weights[0] * chosen_log_probs(leaf, tokens)).sum() + (weights[2] * entropies).sum()
    if inside.any() and not policy.is_greedy:
        total = total + (weights[1][inside] * q[inside]).sum()
    (expected,) = torch.autograd.grad(total, leaf)
    edges = policy_steps(logits, tokens, policy).edges
    found = policy_steps_gradient(
        logits, tokens, policy, edges, by_log_probs=weights[0], by_log_qs=weights[1], by_entropies=weights[2]
    )
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 0.01
