"""Our per-token measures against TRL's, to be run by `make test-peers` in its own environment."""

import importlib.util
import os

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from steerlab.core.policy import SamplingPolicy
from steerlab.measures import nucleus
from steerlab.measures.steps import policy_steps
from steerlab.sequences import SequenceProcessor

missing = importlib.util.find_spec("trl") is None
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError("not installed: trl")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(missing, reason="trl not in this environment; `make test-peers` makes one with it"),
]


@pytest.fixture(scope="module")
def rows():
    """Logits as a 50,000-token model gives them, and tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 12, 50_000, generator=generator)
    return logits, torch.randint(0, 50_000, (4, 12), generator=generator)


def test_selective_log_softmax_and_entropy(rows):
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits, tokens = rows
    ours = policy_steps(logits.flatten(0, 1), tokens.flatten(), SamplingPolicy())
    torch.testing.assert_close(ours.log_probs, selective_log_softmax(logits, tokens).flatten(), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.log_qs, ours.log_probs)
    torch.testing.assert_close(ours.entropies, entropy_from_logits(logits).flatten(), atol=5e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_temperature(rows, temperature):
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits, tokens = rows
    log_qs, entropies = selective_log_softmax_and_entropy(logits, tokens, temperature=temperature)
    ours = policy_steps(logits.flatten(0, 1), tokens.flatten(), SamplingPolicy(temperature=temperature))
    torch.testing.assert_close(ours.log_qs, log_qs.flatten(), atol=5e-5, rtol=0)
    torch.testing.assert_close(ours.entropies, entropies.flatten(), atol=5e-5, rtol=0)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.95, 0.999])
def test_nucleus(top_p):
    # normal quantiles in random order: no two alike, since the warper's own order of equal logits is undefined
    ranks = torch.linspace(-1, 1, 50_002, dtype=torch.float64)[1:-1]
    values = (3 * 2**0.5 * torch.erfinv(ranks)).float()
    assert len(values.unique()) == len(values)
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.3, 3, 40)
    logits = torch.stack([s * values[torch.randperm(50_000, generator=generator)] for s in spread])
    kept = TopPLogitsWarper(top_p)(None, logits) > -torch.inf
    assert torch.equal(nucleus(logits, SamplingPolicy(top_p=top_p)), kept)


def test_a_real_models_responses(smollm2_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    processor = SequenceProcessor(model, tokenizer, config={"generation": {"max_new_tokens": 24}})
    drawn, scored, _ = processor.generate_with_logprobs(num_prompts=3, G=2, seed=0, compute_rb=True)
    for b in range(3):
        for g in range(2):
            response = drawn.response_ids(b, g)
            ids = torch.tensor([[*drawn.prompt_ids(b), *response]])
            with torch.no_grad():
                logits = model(input_ids=ids, logits_to_keep=len(response) + 1).logits[:, :-1]
            theirs = selective_log_softmax(logits, torch.tensor([response]))[0]
            torch.testing.assert_close(scored.logprobs[b][g], theirs, atol=1e-4, rtol=0)
            np.testing.assert_allclose(scored.rb_entropies[b][g], entropy_from_logits(logits)[0], atol=1e-4)
