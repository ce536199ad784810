import math

import pytest
import torch

from steerlab.core.policy import SamplingPolicy
from steerlab.measures import _supports as supports
from steerlab.measures._supports import masks_of, replayed_gradient, replayed_steps, sets_of
from steerlab.measures.nucleus import nucleus
from steerlab.measures.steps import SHAPE_FIELDS, policy_steps, policy_steps_gradient

POLICIES = [SamplingPolicy(), SamplingPolicy(0.6), SamplingPolicy(1.3, top_p=0.8), SamplingPolicy(0.0)]


@pytest.fixture
def logits():
    return 3 * torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def tokens(logits):
    return logits.argmax(dim=-1)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_their_own_nuclei_nothing_changes(logits, tokens, policy):
    inside, eos = nucleus(logits, policy), torch.tensor([2, 5])
    ours = replayed_steps(logits, tokens, policy, inside, with_shape=True, eos_ids=eos)
    theirs = policy_steps(logits, tokens, policy, with_shape=True, eos_ids=eos)
    for name in ("log_probs", "log_qs", "entropies"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-12, rtol=0)
    for name in SHAPE_FIELDS:
        torch.testing.assert_close(getattr(ours.shape, name), getattr(theirs.shape, name), atol=1e-9, rtol=1e-9)
    by = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = {"by_log_probs": by[0], "by_log_qs": by[1], "by_entropies": by[2]}
    torch.testing.assert_close(
        replayed_gradient(logits, tokens, policy, inside, **given),
        policy_steps_gradient(logits, tokens, policy, theirs.edges, **given),
    )


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_on_other_sets_by_the_formulas_written_out(logits, policy):
    generator = torch.Generator().manual_seed(2)
    inside = torch.rand(6, 9, generator=generator) < 0.5
    tokens = torch.tensor([0, 1, 2, 3, 4, 5])
    inside[:5].scatter_(1, tokens[:5, None], True)
    inside[5] = False
    inside[5, 7] = True  # the last token is not among its set
    x = logits.clone().requires_grad_()
    a = (x / policy.temperature).masked_fill(~inside, -math.inf)
    log_q = a.log_softmax(dim=-1)
    q = log_q.exp()
    entropy = -(q * log_q.masked_fill(~inside, 0.0)).sum(dim=-1)
    log_p = x.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    at_token = log_q.gather(-1, tokens[:, None])[:, 0]
    found = replayed_steps(logits, tokens, policy, inside, with_shape=True)
    torch.testing.assert_close(found.log_qs, at_token.detach())
    torch.testing.assert_close(found.log_probs, log_p.detach())
    torch.testing.assert_close(found.entropies, entropy.detach())
    torch.testing.assert_close(found.shape.support_size, inside.sum(dim=-1).double())
    whole = (x / policy.temperature).softmax(dim=-1).detach()
    torch.testing.assert_close(found.shape.head_mass, (whole * inside).sum(dim=-1))
    torch.testing.assert_close(found.shape.tail_mass, (whole * ~inside).sum(dim=-1))
    by = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    (by[0] @ log_p + by[1, :5] @ at_token[:5] + by[2] @ entropy).backward()
    gradient = replayed_gradient(
        logits, tokens, policy, inside, by_log_probs=by[0], by_log_qs=by[1], by_entropies=by[2]
    )
    torch.testing.assert_close(gradient, x.grad)


def test_a_set_far_below_the_highest_logit_loses_nothing():
    logits = torch.tensor([[0.0, 1.0, 500.0]])
    inside = torch.tensor([[True, True, False]])
    found = replayed_steps(logits, torch.tensor([1]), SamplingPolicy(), inside)
    assert found.log_qs.item() == pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-6)
    assert found.log_probs.item() == -499


@pytest.mark.parametrize("d_vocab", [300, 70_001])
def test_masks_and_sets_on_every_device(d_vocab):
    shares = torch.tensor([0, 0.001, 0.5, 0.999, 1])[:, None]
    inside = torch.rand(5, d_vocab, generator=torch.Generator().manual_seed(0)) < shares
    sets = sets_of(inside)
    assert torch.equal(masks_of(sets), inside)
    assert supports._sets_on_device(inside) == sets  # what runs on a GPU
    assert torch.equal(supports._masks_on_device(sets, "cpu"), inside)
