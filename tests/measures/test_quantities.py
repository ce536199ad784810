import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.measures.quantities import LogDistribution, PolicyEntropy, PolicyLogQ, TokenLogProb, from_json

P = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]])
TOKENS = torch.tensor([1, 0])
COLD = SamplingPolicy(temperature=0.7, top_p=0.9)

policies = st.builds(
    SamplingPolicy,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 2]),
    min_p=st.sampled_from([0.0, 0.2]),
)
quantities = st.one_of(
    st.just(TokenLogProb()),
    st.just(LogDistribution()),
    st.builds(PolicyEntropy, policies),
    st.builds(PolicyLogQ, policies),
)


def test_values_by_hand():
    assert TokenLogProb()(P.log(), TOKENS).tolist() == pytest.approx([math.log(0.3), math.log(0.05)])
    assert PolicyLogQ(SamplingPolicy(temperature=0.7))(P.log(), TOKENS)[0].item() == pytest.approx(-1.2594, abs=1e-4)
    assert PolicyEntropy(SamplingPolicy(temperature=0.7))(P.log(), TOKENS).tolist() == pytest.approx(
        [0.9903] * 2, abs=1e-4
    )
    # of 0.5, 0.3, 0.15, 0.05 at top_p 0.6 two are left
    assert PolicyLogQ(SamplingPolicy(top_p=0.6))(P.log(), TOKENS).tolist() == pytest.approx(
        [math.log(0.375), -math.inf]
    )
    torch.testing.assert_close(LogDistribution()(3.0 + P.log(), TOKENS), P.log())


def test_half_precision_is_widened_first():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = LogDistribution()(logits, torch.zeros(3, dtype=torch.long))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits.float().log_softmax(-1))


@given(quantities)
def test_json_gives_the_same_quantity_back(quantity):
    again = from_json(json.loads(json.dumps(quantity.to_json())))
    assert again == quantity
    torch.testing.assert_close(again(P.log(), TOKENS), quantity(P.log(), TOKENS))


@given(policies)
def test_log_q_of_every_token_is_a_distribution_with_that_entropy(policy):
    logits = torch.linspace(-2, 2, 7)[None] ** 3
    every = torch.arange(7)
    q = PolicyLogQ(policy)(logits.expand(7, 7), every).double().exp()
    assert q.sum().item() == pytest.approx(1.0, abs=1e-6)
    entropy = -(q * q.clamp_min(1e-300).log()).sum().item()
    assert PolicyEntropy(policy)(logits, every[:1]).item() == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        {},
        "token_log_prob",
        {"kind": "margin"},
        {"kind": "token_log_prob", "policy": {}},
        {"kind": "policy_log_q"},
        {"kind": "policy_log_q", "policy": {"temperature": 1.0, "typical_p": 0.5}},
    ],
)
def test_other_json_is_refused(data):
    with pytest.raises(InputError):
        from_json(data)


@pytest.mark.parametrize("kind", [PolicyEntropy, PolicyLogQ])
def test_what_needs_the_tokens_before_is_refused(kind):
    with pytest.raises(PolicyError, match="repetition penalty"):
        kind(SamplingPolicy(repetition_penalty=1.2))
