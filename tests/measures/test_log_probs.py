import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core.policy import SamplingPolicy
from steerlab.measures import chosen_log_probs, log_q, nucleus, policy_log_probs, token_log_probs
from steerlab.measures.log_probs import rows_not_finite

P = torch.tensor([0.5, 0.3, 0.15, 0.05])


def test_log_q_is_renormalised_and_not_log_p_over_t():
    value = log_q(P.log(), torch.tensor(1), SamplingPolicy(temperature=0.7)).item()
    assert value == pytest.approx(-1.2594, abs=5e-5)
    assert value != pytest.approx(math.log(0.3) / 0.7, abs=0.1)


def test_greedy_log_q_is_a_point_mass():
    assert log_q(P.log().expand(2, 4), torch.tensor([0, 1]), SamplingPolicy.greedy()).tolist() == [0.0, -math.inf]


def test_default_policy_is_the_models_softmax():
    logits = torch.randn(5, 30)
    tokens = torch.randint(30, (5,))
    torch.testing.assert_close(log_q(logits, tokens, SamplingPolicy()), chosen_log_probs(logits, tokens))


def test_log_q_is_a_column_of_policy_log_probs():
    logits = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    policy = SamplingPolicy(temperature=0.6, top_p=0.8, top_k=12, min_p=0.01)
    whole = policy_log_probs(logits, policy)
    for token in range(40):
        column = log_q(logits, torch.full((6,), token), policy)
        torch.testing.assert_close(column, whole[:, token])


def test_token_log_probs_score_the_next_token():
    logits = torch.randn(2, 5, 7)
    tokens = torch.randint(7, (2, 5))
    expected = [[logits[b, t].log_softmax(-1)[tokens[b, t + 1]] for t in range(4)] for b in range(2)]
    torch.testing.assert_close(token_log_probs(logits, tokens), torch.tensor(expected))


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_shifts_leave_log_probs_finite_and_at_most_zero(shift):
    logits = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    plain, shifted = (chosen_log_probs(x.expand(3, 3), torch.arange(3)) for x in (logits, logits + shift))
    torch.testing.assert_close(plain, shifted)
    single = chosen_log_probs((logits + shift).float().expand(3, 3), torch.arange(3))
    assert (single <= 0).all()
    torch.testing.assert_close(single.double(), plain, atol=2e-3, rtol=0)


def test_impossible_tokens_give_minus_infinity_not_nan():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    assert chosen_log_probs(logits, torch.tensor([1])).item() == -math.inf
    assert log_q(logits, torch.tensor([1]), SamplingPolicy(temperature=0.5)).item() == -math.inf
    assert math.isfinite(chosen_log_probs(logits, torch.tensor([0])).item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype):
    logits = (5 * torch.randn(3, 50)).to(dtype)
    tokens = torch.randint(50, (3,))
    assert torch.equal(chosen_log_probs(logits, tokens), chosen_log_probs(logits.float(), tokens))
    assert chosen_log_probs(logits, tokens).dtype == torch.float32


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30), st.data())
def test_log_probs_are_never_positive(row, data):
    logits = torch.tensor([row])
    token = data.draw(st.integers(0, len(row) - 1))
    policy = SamplingPolicy(temperature=data.draw(st.floats(0.1, 3)), top_p=data.draw(st.floats(0.1, 1)))
    assert chosen_log_probs(logits, torch.tensor([token])).item() <= 0
    value = log_q(logits, torch.tensor([token]), policy).item()
    assert value <= 0
    assert (value > -math.inf) == bool(nucleus(logits, policy)[0, token])


def test_rows_that_are_not_finite():
    logits = torch.zeros(7, 5)
    logits[1, 3], logits[2, 0], logits[3, 4] = math.nan, math.inf, -math.inf
    logits[4, 1], logits[4, 2] = math.nan, -math.inf
    logits[5] = 1e38
    logits[6] = -math.inf  # nothing is left to draw
    assert rows_not_finite(logits).tolist() == [False, True, True, False, True, False, True]
    assert rows_not_finite(torch.tensor([[65504.0, -math.inf]], dtype=torch.float16)).tolist() == [False]
