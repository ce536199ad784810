"""Models that are not TransformerBridges; tests/legacy has HookedTransformer."""

import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import steerlab as sl

D_MODEL, D_VOCAB, NEW = 8, 50, 6


class Averages(HookedRootModule):
    """A causal model: each position sees the mean of the embeddings so far."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(D_VOCAB, D_MODEL, generator=generator))
        self.unembed = nn.Parameter(torch.randn(D_MODEL, D_VOCAB, generator=generator))
        self.hook_mean, self.hook_idle = HookPoint(), HookPoint()
        self.setup()

    def forward(self, tokens):
        return self.run(tokens, torch.ones_like(tokens))

    def run(self, tokens, mask):
        summed = (self.embed[tokens] * mask[..., None]).cumsum(dim=1)
        return self.hook_mean(summed / mask.cumsum(dim=1).clamp_min(1)[..., None]) @ self.unembed


class MaskedAverages(Averages):
    def forward(self, tokens, attention_mask):
        return self.run(tokens, attention_mask)


IDS = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def push(value, hook):
    return value + torch.linspace(-2, 2, D_MODEL)


def by_hand(ids, hook=None):
    model, hooks = Averages(), [] if hook is None else [("hook_mean", hook)]
    for _ in range(NEW):
        logits = model.run_with_hooks(ids[None], fwd_hooks=hooks)
        ids = torch.cat([ids, logits[0, -1:].argmax(-1)])
    return ids.tolist()


def generate(model, ids=IDS[1:], hooks=(), **options):
    return sl.hooked_generate(model, ids, NEW, list(hooks), do_sample=False, **options).tolist()


@pytest.mark.parametrize("model", [Averages(), MaskedAverages()])
def test_a_model_with_hooks_and_without_a_cache_runs(model):
    plain, steered = generate(model), generate(model, hooks=[("hook_mean", push)])
    assert plain == [by_hand(IDS[1])]
    assert steered == [by_hand(IDS[1], push)]
    assert plain != steered


def test_a_mask_lets_prompts_of_different_lengths_share_a_batch():
    found = generate(MaskedAverages(), IDS, [("hook_mean", push)], attention_mask=MASK)
    assert [found[0][2:], found[1]] == [by_hand(IDS[0, 2:], push), by_hand(IDS[1], push)]


def test_without_a_mask_they_cannot():
    with pytest.raises(sl.PromptError, match="Averages takes no attention_mask"):
        generate(Averages(), IDS, attention_mask=MASK)


def test_an_unknown_hook_point_and_one_that_never_fires():
    with pytest.raises(sl.HookPointError, match=r"no hook point 'hook_meen'.*'hook_mean'"):
        generate(Averages(), hooks=[("hook_meen", push)])
    with pytest.raises(sl.HookPointError, match="never fired on this model: hook_idle"):
        generate(Averages(), hooks=[("hook_mean", push), ("hook_idle", push)])


def test_a_cache_that_is_not_installed(monkeypatch):
    class Caching(Averages):
        def forward(self, tokens, past_kv_cache=None):
            return super().forward(tokens)

    monkeypatch.setattr("steerlab.engines.lens._legacy.CACHES", [("transformer_lens.no_such_module", "Cache")])
    with pytest.raises(sl.BackendMissingError, match="takes past_kv_cache, but no TransformerLens"):
        generate(Caching())
    assert generate(Caching(), use_cache=False) == [by_hand(IDS[1])]


def test_a_model_without_hooks():
    with pytest.raises(sl.InputError, match=r"Linear is no module with \.hooks"):
        generate(nn.Linear(2, 2))
