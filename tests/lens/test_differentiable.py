"""Log-probabilities as a function of an added vector: equal to steered scores, with true gradients."""

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import HookPointError

PROMPTS = ["The ferry leaves", "What a wonderful, happy day", "Two"]
TARGETS = [[" the harbour at seven", " noon"], [" it was"], [" plus two", " equals"]]
PLACES = {
    "default": sl.where.last_prompt() | sl.where.generated(),
    "all": sl.where.all(),
    "second generated": sl.where.generated(after=1),
    "span": sl.where.span("e", missing="skip") | sl.where.last_prompt(),
}


def vector_for(engine, seed=0, norm=1.0):
    values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(seed))
    return values / values.norm() * norm


def scores(engine, point, where):
    return engine.added_vector_scores(PROMPTS, TARGETS, point, where)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"])
@pytest.mark.filterwarnings("ignore:.*no token.*")
def test_values_are_those_of_steered_scores(tiny_engine, site, place):
    _, engine = tiny_engine
    values = vector_for(engine, norm=4.0)
    added = sl.SteeringVector.from_tensor(values, layer=1, site=site)
    steered = engine.score(PROMPTS, TARGETS, plan=sl.Plan(sl.add(added, coef=1.0, where=PLACES[place])))
    found = scores(engine, HookPoint(1, site), PLACES[place]).log_probs(range(5), values).detach()
    np.testing.assert_allclose(found.numpy(), [s.log_prob for s in steered], rtol=1e-5, atol=1e-4)
    plain = [s.log_prob for s in engine.score(PROMPTS, TARGETS)]
    changed = np.abs(np.array(plain) - found.numpy()) > 1e-3
    assert changed.any()
    none = scores(engine, HookPoint(1, site), PLACES[place]).log_probs(range(5), torch.zeros_like(values)).detach()
    np.testing.assert_allclose(none.numpy(), plain, rtol=1e-5, atol=1e-4)


def test_rows_come_in_the_order_asked_for_and_batches_do_not_matter(tiny_llama_engine):
    scored = scores(tiny_llama_engine, HookPoint(2), sl.where.all())
    values = vector_for(tiny_llama_engine)
    whole = scored.log_probs(range(5), values).detach()
    scored._batch_tokens = 1
    torch.testing.assert_close(scored.log_probs([4, 0, 2], values), whole[[4, 0, 2]], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("site", ["resid_mid", "resid_post"])
def test_gradients_are_slopes(tiny_llama_engine, site, bridge):
    engine = tiny_llama_engine
    point = engine.model.blocks[0].hook_out
    if bridge:  # a user's hook, which the fast engine would not fire
        point.add_hook(lambda value, hook: None)
    try:
        scored = scores(engine, HookPoint(1, site), sl.where.all())
        values = vector_for(engine).requires_grad_()
        total = scored.log_probs(range(5), values).sum()
        (gradient,) = torch.autograd.grad(total, [values])
        direction = torch.nn.functional.normalize(gradient, dim=0)
        step = 0.02
        with torch.no_grad():
            ends = [scored.log_probs(range(5), values + s * step * direction).sum() for s in (1, -1)]
        slope = float(ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float(gradient.norm()), rel=0.02)
    finally:
        if bridge:
            point.remove_hooks()


def test_the_model_takes_no_gradient(tiny_llama_engine):
    model = tiny_llama_engine.model.original_model
    wanted = [p.requires_grad for p in model.parameters()]
    values = vector_for(tiny_llama_engine).requires_grad_()
    scored = scores(tiny_llama_engine, HookPoint(1), sl.where.all())
    torch.autograd.grad(scored.log_probs(range(5), values).sum(), [values])
    assert all(p.grad is None for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == wanted


def test_unknown_layers_are_refused(tiny_llama_engine):
    with pytest.raises(HookPointError, match="Layer 9"):
        scores(tiny_llama_engine, HookPoint(9), sl.where.all())
