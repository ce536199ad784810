"""Draws by Gumbel noise: the right frequencies, inside the nucleus, and unmoved by rounding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steerlab.core._seeds import draw_keys, row_key
from steerlab.core.policy import SamplingPolicy
from steerlab.measures import nucleus, policy_log_probs
from steerlab.measures._token_draws import draw, gumbel_noise

policies = st.builds(
    SamplingPolicy,
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 20),
    min_p=st.floats(0, 1),
)
logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20).map(lambda row: torch.tensor([row]))
int64 = st.integers(-(2**63), 2**63 - 1)


def keys(n, seed=0):
    return torch.from_numpy(draw_keys(row_key(seed, 0, 0), n))


def noise_by_hand(key, d_vocab):
    """The same in unsigned 32-bit integers of NumPy and float64."""

    def mixed(x):
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)
    x = mixed(mixed(np.arange(d_vocab, dtype=np.uint32) * np.uint32(0x9E3779B1) + low) ^ high)
    return -np.log(-np.log1p(-((x & np.uint32(0x7FFFFFFF)) + 0.5) / 2**31))


def by_inverse_cdf(log_q, uniforms):
    """The other way to draw: the token whose cumulative interval holds a uniform number."""
    cdf = log_q.double().exp().cumsum(-1)
    return torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0].clamp_max(log_q.shape[-1] - 1)


@pytest.mark.parametrize("key", [0, -1, 1, 2**63 - 1, -(2**63), 123456789012345])
def test_the_noise_is_that_of_unsigned_arithmetic(key):
    found = gumbel_noise(torch.tensor([key]), 5000)[0]
    np.testing.assert_allclose(found.numpy(), noise_by_hand(key, 5000), rtol=2e-5, atol=2e-6)


def test_noise_is_finite_gumbel_and_uncorrelated():
    noise = gumbel_noise(keys(200), 5000)
    assert noise.isfinite().all()
    assert stats.kstest(noise.flatten().numpy(), stats.gumbel_r.cdf).pvalue > 0.01
    centred = noise.double() - noise.double().mean()
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1)), centred.roll((-1, 7), (0, 1))):
        assert abs(float((centred * other).mean() / centred.var())) < 4 / math.sqrt(noise.numel())


def test_noise_does_not_depend_on_batch_or_vocabulary():
    whole = gumbel_noise(keys(3), 100)
    assert torch.equal(gumbel_noise(keys(3)[1:2], 60)[0], whole[1, :60])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_have_the_right_frequencies(seed):
    p = torch.tensor([0.0, 0.5, 1e-3, 0.0, 0.249, 0.2, 0.04, 0.01, 0.0])
    drawn = draw(p.log().expand(20_000, -1), keys(20_000, seed)).bincount(minlength=len(p))
    possible = p > 0
    assert drawn[~possible].sum() == 0
    assert stats.chisquare(drawn[possible], p[possible] * 20_000 / p.sum()).pvalue > 0.01


def test_frequencies_over_a_large_vocabulary():
    logits = torch.randn(32_000, generator=torch.Generator().manual_seed(3)) * 2
    p = logits.double().softmax(-1)
    order = p.argsort(descending=True)
    drawn = torch.cat([draw(logits.log_softmax(-1).expand(100, -1), part) for part in keys(5000).split(100)])
    bins = (p[order].cumsum(0) * 50).long().clamp_max(49)  # 50 groups of tokens, of one mass each or nearly so
    place = torch.empty_like(order).index_copy_(0, order, bins)
    wanted = torch.zeros(50, dtype=torch.float64).index_add_(0, place, p)
    assert stats.chisquare(place[drawn].bincount(minlength=50), wanted * 5000).pvalue > 0.01


@given(logit_rows, policies, int64)
def test_draws_stay_inside_the_nucleus(logits, policy, key):
    assert nucleus(logits, policy)[0, draw(policy_log_probs(logits, policy), torch.tensor([key]))[0]]


def test_a_draw_depends_on_its_own_row_alone():
    log_q = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    alone = torch.cat([draw(log_q[i : i + 1], keys(8)[i : i + 1]) for i in range(8)])
    assert torch.equal(draw(log_q, keys(8)), alone)


def test_rounding_moves_hardly_any_draw():
    """Logits of lower ids 3e-5 up and the others down: summed up, that moves a hundred times the draws."""
    generator = torch.Generator().manual_seed(1)
    n, d_vocab = 4000, 4096
    logits = torch.randn(d_vocab, generator=generator, dtype=torch.float64).expand(n, -1)
    rounding = torch.where(torch.arange(d_vocab) < d_vocab // 2, 3e-5, -3e-5)
    exact, rounded = logits.log_softmax(-1), (logits + rounding).log_softmax(-1)
    uniforms = torch.rand(n, generator=generator, dtype=torch.float64)
    assert int((draw(exact, keys(n)) != draw(rounded, keys(n))).sum()) <= 2
    assert int((by_inverse_cdf(exact, uniforms) != by_inverse_cdf(rounded, uniforms)).sum()) >= 20


def test_a_token_that_leaves_the_nucleus_moves_only_draws_of_itself():
    logits = torch.randn(200, generator=torch.Generator().manual_seed(2)).expand(2000, -1)
    inside = policy_log_probs(logits, SamplingPolicy(top_p=0.9))
    edge = inside[0].masked_fill(inside[0] == -math.inf, math.inf).argmin()
    without = inside.index_fill(1, edge, -math.inf)
    drawn, again = draw(inside, keys(2000)), draw(without, keys(2000))
    assert torch.equal(drawn != again, drawn == edge)
    assert (drawn == edge).any()
