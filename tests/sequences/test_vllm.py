"""Responses drawn by real vLLM, scored by the processor; kept here because the scoring is what is tested."""

import importlib.util

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.sequences import SequenceProcessor
from steerlab.steering import plan as plan_module
from tests.sequences.test_forcing import flat
from tests.tiny_models import build_tiny_llama
from tests.vllm.conftest import started

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPTS = ["The ferry leaves", "Two plus two equals four, and ten minus 3"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # the smallest heads that vLLM's CPU attention takes
    directory = tmp_path_factory.mktemp("sequences") / "llama"
    return build_tiny_llama(directory, context=256, hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="module")
def engine(path):
    with started(path, layers=[2], max_num_batched_tokens=256) as engine:
        yield engine


@pytest.fixture
def make(path):
    def processor(**policy):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        config = {"generation": {"max_new_tokens": 20, **policy}}
        return SequenceProcessor(model, AutoTokenizer.from_pretrained(path), config=config)

    return processor


@pytest.mark.parametrize("steered", [False, True])
def test_log_q_is_what_vllm_recorded(engine, make, steered):
    vector = sl.SteeringVector.from_tensor(torch.randn(128, generator=torch.Generator().manual_seed(0)), layer=2)
    plan = sl.Plan(sl.add(vector, coef=2.0)) if steered else None
    drawn, scored, _ = make().generate_with_logprobs(PROMPTS, G=3, seed=0, plan=plan, engine=engine)
    assert sum(map(sum, drawn.gen_lens)) > 60
    np.testing.assert_allclose(flat(scored.token_logqs), flat(drawn.sampler_logqs), atol=1e-3)


def test_a_row_that_is_not_finite_is_named(engine, make, monkeypatch):
    monkeypatch.setattr(plan_module, "check_finite_range", lambda edits, info: None)
    vector = sl.SteeringVector.from_tensor(torch.ones(128), layer=2)
    plan = sl.Plan(sl.add(vector, coef=1e30)).scaled(1e20)
    with pytest.raises(sl.NonFiniteError, match=r"prompt 0, sample 0 are not finite .* smaller strength"):
        make().generate_batched(PROMPTS, 2, seed=0, plan=plan, engine=engine)


def test_under_other_policies_every_token_lies_in_the_nucleus(engine, make):
    processor = make(temperature=0.8, top_p=0.7)
    drawn, scored, _ = processor.generate_with_logprobs(PROMPTS, G=8, seed=0, engine=engine, compute_rb=True)
    np.testing.assert_allclose(flat(scored.token_logqs), flat(drawn.sampler_logqs), atol=1e-3)
    assert not flat(scored.outside_nucleus).any()
    naive, rb = -flat(scored.token_logqs), flat(scored.rb_entropies)
    assert abs(naive.mean() - rb.mean()) < 4 * naive.std() / len(naive) ** 0.5


def test_other_weights_are_refused(engine, make):
    processor = make()
    with torch.no_grad():
        processor.parts.root.model.layers[0].mlp.up_proj.weight.mul_(1.05)
    with pytest.raises(InputError, match="its weights are not the model's"):
        processor.generate_batched(PROMPTS, 1, seed=0, engine=engine)
