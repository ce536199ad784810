import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from steerlab.core.policy import SamplingPolicy
from steerlab.measures import apply_repetition_penalty, nucleus, policy_log_probs

policies = st.builds(
    SamplingPolicy,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 5)),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 20),
    min_p=st.floats(0, 1),
)
logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20).map(lambda row: torch.tensor([row]))


def kept(probabilities, **policy):
    return nucleus(torch.tensor(probabilities).log(), SamplingPolicy(**policy)).nonzero()[:, 0].tolist()


def huggingface(policy: SamplingPolicy) -> LogitsProcessorList:
    warpers = [TemperatureLogitsWarper(policy.temperature)]
    if policy.top_k:
        warpers.append(TopKLogitsWarper(policy.top_k))
    if policy.top_p < 1:
        warpers.append(TopPLogitsWarper(policy.top_p))
    if policy.min_p:
        warpers.append(MinPLogitsWarper(policy.min_p))
    return LogitsProcessorList(warpers)


# --- worked by hand -----------------------------------------------------------------------------------------------


def test_mass_that_reaches_top_p_exactly_ends_the_set():
    assert kept([0.3, 0.1, 0.1, 0.5], top_p=0.8) == [0, 3]


def test_the_boundary_token_stays():
    assert kept([0.5, 0.3, 0.2], top_p=0.6) == [0, 1]
    assert kept([0.5, 0.3, 0.2], top_p=0.5) == [0]
    assert kept([0.5, 0.3, 0.2], top_p=0.01) == [0]


def test_top_k_and_top_p_both_apply():
    probabilities = [1.0 / 64] * 64
    assert kept(probabilities, top_k=40) == list(range(40))
    assert kept(probabilities, top_k=40, top_p=0.05) == [0, 1]


def test_greedy_is_the_argmax_alone():
    assert kept([0.2, 0.5, 0.3], temperature=0.0) == [1]


@pytest.mark.parametrize("policy", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.1}])
def test_ties_keep_the_lower_id(policy):
    assert kept([0.1, 0.3, 0.3, 0.3], **policy) == [1]


@pytest.mark.parametrize("policy", [{"top_k": 3}, {"top_p": 0.7}])
def test_ties_keep_the_lower_ids_in_a_large_vocabulary(policy):
    row = torch.full((5000,), -20.0)
    row[[17, 400, 401, 3000]] = 5.0
    assert nucleus(row, SamplingPolicy(**policy)).nonzero()[:, 0].tolist() == [17, 400, 401]


def test_impossible_tokens_never_enter():
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf])
    for policy in (SamplingPolicy(), SamplingPolicy(top_k=3), SamplingPolicy(top_p=0.999), SamplingPolicy(min_p=0.01)):
        assert nucleus(logits, policy).tolist() == [True, False, True, False]
        assert not policy_log_probs(logits, policy).isnan().any()


def test_the_set_is_chosen_in_float32_whatever_comes_in():
    logits = torch.randn(4, 50, dtype=torch.float64)
    policy = SamplingPolicy(temperature=0.7, top_p=0.8)
    assert torch.equal(nucleus(logits, policy), nucleus(logits.float(), policy))


# --- against Hugging Face -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 5, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3])
def test_equals_the_warpers(temperature, top_k, top_p, min_p):
    policy = SamplingPolicy(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = 4 * torch.randn(16, 300, generator=torch.Generator().manual_seed(0))
    assert all(len(row.unique()) == 300 for row in logits)
    warped = huggingface(policy)(torch.zeros(16, 1, dtype=torch.long), logits.clone())
    assert torch.equal(nucleus(logits, policy), warped > -math.inf)
    torch.testing.assert_close(policy_log_probs(logits, policy), warped.log_softmax(-1), rtol=0, atol=2e-6)


def test_repetition_penalty_equals_the_processor():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[1, 2, 2], [0, 5, 19], [7, 7, 7]])
    seen = torch.zeros(3, 20, dtype=torch.bool).scatter_(1, ids, True)
    ours = apply_repetition_penalty(logits, seen, SamplingPolicy(repetition_penalty=1.3))
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone()))
    assert torch.equal(apply_repetition_penalty(logits, seen, SamplingPolicy()), logits)


# --- properties ---------------------------------------------------------------------------------------------------


@given(logit_rows, policies)
def test_mass_is_one_and_something_survives(logits, policy):
    inside = nucleus(logits, policy)
    log_q = policy_log_probs(logits, policy)
    assert inside.any()
    assert inside[0, logits[0].argmax()]
    assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(log_q > -math.inf, inside)
    assert (log_q <= 1e-6).all()


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=20), policies, st.integers(-64, 64))
def test_a_shift_of_all_logits_changes_nothing(values, policy, shift):
    logits = torch.tensor([values]) / 4  # exact in float32, so the shift is exact too
    assert torch.equal(
        nucleus(logits, SamplingPolicy(1.0, policy.top_p, policy.top_k, policy.min_p)),
        nucleus(logits + shift, SamplingPolicy(1.0, policy.top_p, policy.top_k, policy.min_p)),
    )


@given(logit_rows, st.floats(0.01, 0.98))
def test_the_set_grows_with_top_p_and_holds_its_mass(logits, top_p):
    small, large = (nucleus(logits, SamplingPolicy(top_p=p)) for p in (top_p, top_p + 0.02))
    assert not (small & ~large).any()
    assert float(logits.softmax(-1)[small].sum()) >= top_p - 1e-5
