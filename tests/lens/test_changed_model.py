"""A model that its owner changes after an engine was made on it: every engine runs the model as it is now."""

import pytest
import torch
from torch import nn

import steerlab as sl
from tests.tiny_models import build_tiny_gpt2

PROMPTS = [[5, 6, 7, 8], [9, 10]]
ENGINES = ["bridge", "fast", "graph"]


class LowRank(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

    def forward(self, hidden):
        return self.base(hidden) + hidden @ self.down.T @ self.up.T


def log_probs(engine, name):
    drawn = engine.generate(PROMPTS, max_new_tokens=4, policy=sl.SamplingPolicy(temperature=0), engine=name)
    return torch.tensor([completion.token_log_probs for completion in drawn])


def replaced_head(model):
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    nn.init.normal_(head.weight, std=0.2, generator=torch.Generator().manual_seed(0))
    model.lm_head = head


def adapter_in_a_layer(model):
    wrapper = model.model.layers[1].mlp._original_component.up_proj
    wrapper._modules["_original_component"] = LowRank(wrapper._modules["_original_component"])


@pytest.mark.parametrize("change", [replaced_head, adapter_in_a_layer])
def test_a_module_that_was_replaced_reaches_every_engine(tiny_llama_path, change):
    with sl.load(tiny_llama_path, device="cpu") as engine:
        before = [log_probs(engine, name) for name in ENGINES]
        change(engine.model.original_model)
        bridge, *others = [log_probs(engine, name) for name in ENGINES]
    assert (bridge - before[0]).abs().max() > 0.1
    for other in others:
        torch.testing.assert_close(other, bridge, atol=1e-4, rtol=0)


def test_a_hook_inside_a_module_that_came_later_is_heard(tiny_llama_path):
    with sl.load(tiny_llama_path, device="cpu") as engine:
        log_probs(engine, "auto")
        model, heard = engine.model.original_model, []
        adapter_in_a_layer(model)
        adapter = next(module for module in model.modules() if isinstance(module, LowRank))
        adapter.register_forward_hook(lambda *_: heard.append(True))
        log_probs(engine, "auto")
    assert heard


def test_training_mode_drops_nothing_out(tmp_path):
    with sl.load(build_tiny_gpt2(tmp_path / "gpt2"), device="cpu") as engine:
        model = engine.model.original_model
        dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        for module in dropouts:
            module.p = 0.5
        before = [log_probs(engine, name) for name in ENGINES]
        model.train()
        after = [log_probs(engine, name) for name in ENGINES]
        assert dropouts
        assert all(module.training for module in model.modules())
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
