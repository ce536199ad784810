import warnings

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import steerlab as sl
from steerlab._runtime.capturing import whole_prompt_hooks
from steerlab.core.errors import PlanError

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)


def test_whole_prompt_hooks_act_at_absolute_positions_of_each_call():
    plan = sl.Plan(sl.add(V, coef=1.0, where=sl.where.index(1) | sl.where.last_prompt()))
    ((name, hook),) = whole_prompt_hooks(plan)
    assert name == "blocks.1.hook_resid_post"
    for length in (4, 2):
        change = hook(torch.zeros(1, length, 2), hook=None)[0].norm(dim=-1)
        assert change.nonzero()[:, 0].tolist() == sorted({1, length - 1})


def test_an_edit_at_resid_mid_is_carried_past_the_mlp():
    plan = sl.Plan(sl.add(V.at(1, "resid_mid"), coef=1.0, where=sl.where.all()))
    (_, change), (name, carry) = whole_prompt_hooks(plan)
    assert name == "blocks.1.hook_resid_post"
    stream = torch.ones(1, 2, 2)
    assert torch.equal(change(stream, hook=None) - stream, V.values.expand(1, 2, 2))
    assert torch.equal(carry(stream, hook=None) - stream, V.values.expand(1, 2, 2))


def test_an_edit_that_selects_nothing_is_noticed(tiny_llama_engine):
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    plan = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.index(50)), sl.add(vector, coef=1.0))
    with pytest.warns(UserWarning, match=r"blocks\.1\.hook_resid_post selects no token") as caught:
        tiny_llama_engine.generate([[5, 6, 7]], plan=plan, max_new_tokens=3)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_llama_engine.score(
            [[5, 6]], [[[7], [8, 9]]], plan=sl.Plan(sl.add(vector, coef=1.0, where=sl.where.generated()))
        )


def test_a_hook_does_not_see_a_condition_of_another_hook_point():
    here = sl.Plan(sl.add(V, coef=1.0, where=sl.where.all(), when=sl.when(V, above=-1.0)))
    ((_, hook),) = whole_prompt_hooks(here)
    assert torch.equal(hook(torch.zeros(1, 2, 2), hook=None), V.values.expand(1, 2, 2))
    elsewhere = sl.Plan(sl.add(V, coef=1.0, when=sl.when(V.at(0), above=-1.0)))
    with pytest.raises(PlanError, match="read at another hook point"):
        whole_prompt_hooks(elsewhere)


@pytest.fixture
def layers_run(monkeypatch):
    """How many layers of a Llama have run."""
    forward, ran = LlamaDecoderLayer.forward, []

    def counted(self, *args, **kwargs):
        ran.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    return ran


def test_a_pass_ends_after_the_last_layer_that_is_read_or_edited(tiny_llama_engine, layers_run):
    prompts = [[5, 6, 7, 8], [9, 10]]
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=2)
    later = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.all()))
    whole = {plan: tiny_llama_engine.capture(prompts, layers="all", plan=plan) for plan in (None, later)}
    for plan, n_layers in ((None, 2), (later, 3)):
        layers_run.clear()
        read = tiny_llama_engine.capture(prompts, layers=[0, 1], plan=plan)
        assert len(layers_run) == n_layers
        assert read.receipts == whole[plan].receipts
        for layer in (0, 1):
            assert torch.equal(read[layer], whole[plan][layer])
    assert tiny_llama_engine.logits(prompts[0]).isfinite().all()  # nothing of it is left on the model
