"""Responses drawn by real vLLM, scored by the processor; kept here because the scoring is what is tested."""

import importlib.util

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.sequences import SequenceProcessor, token_ratios
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


@pytest.fixture(scope="module")
def narrow_engine(path):
    with started(path, layers=[2], max_num_batched_tokens=256, dtype="bfloat16") as engine:
        yield engine


@pytest.fixture
def make(path):
    def processor(dtype=torch.float32, precision=None, **policy):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        config = {"generation": {"max_new_tokens": 20, **policy}, "precision": precision or {}}
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


def test_weights_are_compared_once(engine, make, monkeypatch):
    processor, asked = make(), []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda *args, **kwargs: asked.append(args) or score(*args, **kwargs))
    for seed in range(3):
        processor.generate_batched(PROMPTS, 1, seed=seed, engine=engine)
    assert len(asked) == 1
    with torch.no_grad():
        processor.parts.head.weight[0, 0] += 1e-6
    processor.generate_batched(PROMPTS, 1, seed=0, engine=engine)
    assert len(asked) == 2


def test_a_processor_is_made_of_weights_that_are_here(engine):
    with pytest.raises(InputError, match=r"VLLMEngine are in another process.*draw through the engine"):
        SequenceProcessor(engine)


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [({"temperature": 0.8, "top_p": 0.7}, range(1, 300)), ({"temperature": 0.0}, [1]), ({}, [384])],
)
def test_tokens_carry_the_set_they_were_drawn_from(engine, make, policy, chosen):
    processor = make(**policy)
    drawn = processor.generate_batched(PROMPTS, 3, seed=1, engine=engine)
    for b, row in enumerate(drawn.supports):
        for g, sets in enumerate(row):
            assert set(sets.sizes.tolist()) <= set(chosen)
            assert all(token in ids for token, ids in zip(drawn.response_ids(b, g), sets, strict=True))
    scored = processor.teacher_force_logprobs(drawn, support="replayed")
    np.testing.assert_allclose(flat(scored.token_logqs), flat(drawn.sampler_logqs), atol=1e-3)
    assert processor.generate_batched(PROMPTS, 1, seed=1, engine=engine, with_support=False).supports is None


def test_replayed_ratios_are_exactly_one_in_half_precision(narrow_engine, make):
    policy = {"temperature": 0.9, "top_p": 0.8, "max_new_tokens": 40}
    processor = make(torch.bfloat16, {"func_override": {"cast_params": False}}, **policy)
    drawn = processor.generate_batched(PROMPTS, 6, seed=0, engine=narrow_engine)
    old = processor.teacher_force_logprobs(drawn, support="replayed", compute_rb=True)
    for with_grad in (False, True):
        new = processor.teacher_force_logprobs(drawn, with_grad, support="replayed", compute_rb=True)
        ratios = flat(token_ratios(new, old))
        assert len(ratios) > 300
        assert (ratios == 1).all()
    health = processor.ratio_health(drawn)
    assert health.num_flipped > 0
    assert health.recomputed.num_impossible > 0 == health.replayed.num_impossible
    assert list(health.to_frame().support) == ["recomputed", "replayed"]
