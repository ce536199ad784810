"""The stream and head of each model family are found at load, and edits do there what they do in the reference engine.

Llama is in the other tests.
"""

import itertools

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.engines.vllm._wire.config import SITES
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_SHARED = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128}
FAMILIES = {
    "qwen2": (Qwen2Config, _SHARED),
    "qwen3": (Qwen3Config, {**_SHARED, "head_dim": 32}),
    "gemma2": (Gemma2Config, {**_SHARED, **_GEMMA, "tie_word_embeddings": True}),
    "gemma3": (Gemma3TextConfig, {**_SHARED, **_GEMMA, "layer_types": _ALTERNATING}),
    "gpt2": (GPT2Config, {"n_embd": 128, "n_layer": 3, "n_head": 4}),
    "mistral": (MistralConfig, {**_SHARED, "head_dim": 32}),
    "phi3": (Phi3Config, {**_SHARED, "sliding_window": None}),
    "olmo2": (Olmo2Config, _SHARED),
    "mixtral": (MixtralConfig, {**_SHARED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
PROMPTS = ["Where did you put the keys?", "She opened the window, because the room was warm and quiet"]


@pytest.fixture(autouse=True)
def unwritten_memory(monkeypatch):
    """Without a cache vLLM's attention leaves its output as the memory was: full of NaN, for the probe."""
    from steerlab.engines.vllm._worker import wiring

    probe = wiring.probe

    def poisoned(*args):
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
        try:
            assert torch.empty(3).isnan().all()
            return probe(*args)
        finally:
            torch.use_deterministic_algorithms(False)

    monkeypatch.setattr(wiring, "probe", poisoned)


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_and_readings_equal_the_reference(family, tmp_path, start):
    config, values = FAMILIES[family]
    path = save_tiny(AutoModelForCausalLM.from_config, config, tmp_path / family, context=128, **values)
    v = sl.SteeringVector.from_tensor(torch.randn(128, generator=torch.Generator().manual_seed(1)), layer=1)
    u = sl.SteeringVector.from_tensor(torch.randn(128, generator=torch.Generator().manual_seed(2)), layer=2)
    inside = [sl.SteeringVector(v.values, HookPoint(1, site)) for site in ("attn_out", "resid_mid", "mlp_out")]
    plan = sl.Plan(sl.add(v, coef=3.0), sl.ablate(u, where=sl.where.all()), *(sl.add(x, coef=0.5) for x in inside))
    greedy = {"policy": sl.SamplingPolicy.greedy(), "max_new_tokens": 12}
    with sl.load(path, device="cpu") as lens:
        theirs = [lens.generate(PROMPTS, plan=p, engine="bridge", **greedy) for p in (None, plan)]
        read = {site: lens.capture(PROMPTS, layers=[0, 1, 2], plan=plan, site=site) for site in SITES}
    with start(path, layers="all", sites=SITES) as engine:
        ours = [engine.generate(PROMPTS, plan=p, **greedy) for p in (None, plan)]
        mine = {site: engine.capture(PROMPTS, layers=[0, 1, 2], plan=plan, site=site) for site in SITES}
        scored = [
            engine.score([list(ids) for ids in rows.prompt_token_ids], [[row.token_ids] for row in rows], plan=p)
            for rows, p in zip(ours, (None, plan), strict=True)
        ]
        assert [worker["head"] for worker in engine._running.workers] == ["float32"]
    for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert a.token_ids == b.token_ids
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=2e-3)
    for a, b in zip([*ours[0], *ours[1]], [*scored[0], *scored[1]], strict=True):
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=2e-4)
    for site, layer in itertools.product(SITES, range(3)):
        torch.testing.assert_close(mine[site][layer], read[site][layer], atol=5e-3, rtol=1e-3)
