"""On a host with two GPUs: a model spread over both scores, and gives gradients, as on one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from steerlab.sequences import SequenceProcessor
from tests.sequences.device_scenarios import MOVED, plan, sequences
from tests.sequences.test_forcing import flat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def processors(request, tmp_path, tokenizer):
    """On one GPU, and on two."""
    from tests.tiny_models import build_tiny_llama

    path = build_tiny_llama(tmp_path / "llama", tie_word_embeddings=request.param)
    halves = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0 if request.param else 1}
    halves |= {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    made = []
    for device_map in ({"": 0}, halves):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map=device_map).eval()
        made.append(SequenceProcessor(model, tokenizer, config={"generation": {"top_p": 0.9}}))
    assert len({p.device for p in made[1].parts.root.parameters()}) == 2
    return made


def test_scores_and_gradients(processors):
    found = []
    for processor in processors:
        scored = processor.teacher_force_logprobs(sequences(), with_grad=True, plan=plan())
        sum(values.sum() for row in scored.logprobs for values in row).backward()
        gradients = {n: p.grad.cpu() for n, p in processor.parts.root.named_parameters()}
        found.append((torch.cat([values.detach().cpu() for row in scored.logprobs for values in row]), gradients))
    (one, by_one), (two, by_two) = found
    torch.testing.assert_close(two, one, atol=1e-4, rtol=0)
    for name, value in by_one.items():
        torch.testing.assert_close(by_two[name], value, atol=1e-3 * value.abs().max().item(), rtol=1e-3)


def test_an_override_by_eta(processors):
    slopes = []
    for processor in processors:
        v = {name: torch.ones(processor.parts.root.get_parameter(name).shape) for name in MOVED}
        eta = torch.tensor(0.01, requires_grad=True)
        scored = processor.teacher_force_logprobs(
            sequences(), with_grad=True, params_override=processor.params_override(v, eta)
        )
        slopes.append(torch.autograd.grad(sum(values.sum().cpu() for row in scored.logprobs for values in row), eta)[0])
    torch.testing.assert_close(slopes[1], slopes[0], atol=1e-3, rtol=1e-3)


def test_no_graph(processors):
    one, two = (flat(p.teacher_force_logprobs(sequences(), compute_rb=True, plan=plan()).logprobs) for p in processors)
    assert two == pytest.approx(one, abs=1e-4)
