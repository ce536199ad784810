"""One set of weights under an engine and a SequenceProcessor, made either way round."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl

PROMPTS = ["Hi", "The capital of France is", "Two plus two equals"]
TARGETS = [[" you"], [" Paris", " not Rome"], [" four"]]
GREEDY = sl.SamplingPolicy.greedy()
CONFIG = {"generation": {"max_new_tokens": 6, "temperature": 0}}


@pytest.fixture(params=["tiny_llama_path", "tiny_gpt2_path"])
def path(request):
    return request.getfixturevalue(request.param)


def storages(model):
    """Where the parameters lie. (A bridge of GPT-2 has more: TransformerLens adds its split of the joint weights.)"""
    return {parameter.data_ptr() for parameter in model.parameters()}


def inside(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_a_processor_made_from_an_engine_shares_its_weights_and_gives_the_models_numbers(path):
    with sl.load(path, device="cpu") as engine:
        processor = sl.SequenceProcessor(engine, config=CONFIG)
        assert storages(processor.parts.root) <= storages(engine.model.original_model)
        assert processor.tokenizer is engine.tokenizer
        own = sl.SequenceProcessor(inside(path), engine.tokenizer, config=CONFIG)
        drawn, expected = (one.generate_batched(PROMPTS, 2, seed=1) for one in (processor, own))
        assert torch.equal(drawn.sequences, expected.sequences)
        found, wanted = (one.teacher_force_logprobs(drawn) for one in (processor, own))
        for b, g in [(0, 0), (1, 1), (2, 0)]:
            assert torch.equal(found.logprobs[b][g], wanted.logprobs[b][g])
        assert [c.token_ids for c in engine.generate(PROMPTS, policy=GREEDY, max_new_tokens=6)] == [
            drawn.response_ids(b, 0) for b in range(3)
        ]


def test_a_step_of_training_moves_the_engine_too(path):
    with sl.load(path, device="cpu") as engine:
        processor = sl.SequenceProcessor(engine, config=CONFIG)
        before = engine.score(PROMPTS, TARGETS).log_prob
        sequences = processor.generate_batched(PROMPTS, 1, seed=1)
        scored = processor.teacher_force_logprobs(sequences, with_grad=True)
        torch.cat([values for row in scored.logprobs for values in row]).sum().backward()
        torch.optim.SGD(processor.parts.root.parameters(), lr=0.05).step()
        assert engine.score(PROMPTS, TARGETS).log_prob.tolist() != before.tolist()


def test_an_engine_made_from_a_model_in_memory_shares_its_weights_and_leaves_it_alone(path):
    model, tokenizer = inside(path), AutoTokenizer.from_pretrained(path)
    modules = list(model.modules())
    config, training = model.config.to_dict(), model.training
    with sl.load(path, device="cpu") as read, sl.load(model, tokenizer=tokenizer) as engine:
        assert storages(model) <= storages(engine.model.original_model)
        assert engine.info.weights_hash == read.info.weights_hash
        assert engine.median_norm(1) == read.median_norm(1)
        for name in ("bridge", "fast"):
            found, wanted = (e.generate(PROMPTS, n=2, seed=3, max_new_tokens=6, engine=name) for e in (engine, read))
            assert [(c.token_ids, c.token_log_qs) for c in found] == [(c.token_ids, c.token_log_qs) for c in wanted]
        assert engine.score(PROMPTS, TARGETS).log_prob.tolist() == read.score(PROMPTS, TARGETS).log_prob.tolist()
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert (model.config.to_dict(), model.training) == (config, training)


def test_an_engine_made_from_a_processor_shares_model_and_tokenizer(path):
    processor = sl.SequenceProcessor(inside(path), AutoTokenizer.from_pretrained(path), config=CONFIG)
    with sl.load(processor) as engine:
        assert storages(processor.parts.root) <= storages(engine.model.original_model)
        assert engine.tokenizer is processor.tokenizer
        drawn = processor.generate_batched(PROMPTS, 1, seed=1, engine=engine)
        assert torch.equal(drawn.sequences, processor.generate_batched(PROMPTS, 1, seed=1).sequences)


def test_results_carry_their_receipts(path, tmp_path):
    processor = sl.SequenceProcessor(inside(path), AutoTokenizer.from_pretrained(path), config=CONFIG)
    vector = sl.SteeringVector.from_tensor(torch.ones(processor.parts.head.in_features), layer=1)
    plan = sl.Plan(sl.add(vector, coef=1.0))
    drawn = processor.generate_batched(PROMPTS, 2, seed=1, plan=plan)
    assert list(drawn.receipts) == processor.receipts
    assert len(drawn.receipts) == 6
    scored = processor.teacher_force_logprobs(drawn, plan=plan)
    assert list(scored.receipts) == processor.receipts
    assert type(drawn).load(drawn.save(tmp_path / "drawn")).receipts == ()
