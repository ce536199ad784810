"""Arguments under the names of other libraries: a TypeError that says what they are called here."""

import inspect

import pytest
import torch

import steerlab as sl
from steerlab.core._arguments import INSTEAD
from steerlab.engines.vllm.engine import VLLMEngine, check_vllm_engine
from steerlab.engines.vllm.repcontrol import RepControl

VECTOR = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
PLAN = sl.Plan(sl.add(VECTOR, coef=1.0))

CASES = [
    (lambda e: e.generate("Hi", temperature=0.7), r"use policy=sl\.SamplingPolicy\(temperature=0\.7\)"),
    (lambda e: e.generate("Hi", max_tokens=5), "use max_new_tokens="),
    (lambda e: e.generate("Hi", max_length=5), "max_new_tokens=, which counts new tokens only"),
    (lambda e: e.generate("Hi", do_sample=False), "SamplingPolicy.greedy"),
    (lambda e: e.generate("Hi", num_return_sequences=2), "use n="),
    (lambda e: e.generate("Hi", stop_token_ids=[2]), "use stop=, strings"),
    (lambda e: e.generate("Hi", alpha=2.0), r"use plan=sl\.Plan"),
    (lambda e: e.generate(prompt="Hi"), "use prompts, the first argument"),
    (lambda e: e.generate("Hi", wings=2), "wings: its arguments are prompts, plan, policy, max_new_tokens"),
    (lambda e: e.generate("Hi", top_p=0.9, max_tokens=5), r"top_p=0\.9\).*use max_new_tokens="),
    (
        lambda e: sl.SamplingPolicy(topp=0.9),
        "SamplingPolicy has no argument topp: its arguments are",
    ),
    (lambda e: sl.Controls(flips=20), "Controls has no argument flips: its arguments are random"),
    (lambda e: sl.GenerationConfig(topp=0.9), "GenerationConfig has no argument topp: its arguments are temperature"),
    (lambda e: e.stream("Hi", top_k=5), r"SamplingPolicy\(top_k=5\)"),
    (lambda e: e.score("Hi", target=["a"]), "use targets="),
    (lambda e: e.score("Hi", ["a"], steering_vector=1), r"use plan="),
    (lambda e: e.capture("Hi", layer=1), "use layers="),
    (lambda e: e.capture("Hi", layers=1, token_pos=-1), "use where="),
    (lambda e: sl.load("smollm2-135m", torch_dtype="float32"), "use dtype="),
    (lambda e: sl.load("smollm2-135m", tensor_parallel_size=2), "use n_devices="),
    (lambda e: sl.extract(e, None, layer=1), "use layers="),
    (lambda e: sl.extract(e, None, read_token_index=-1), "use read="),
    (lambda e: sl.add(VECTOR, alpha=2.0), r"use coef= \(raw\) or dose="),
    (lambda e: sl.add(VECTOR, coefficient=2.0), r"use coef="),
    (lambda e: sl.add(VECTOR, multiplier=2.0), r"use coef="),
    (lambda e: sl.add(VECTOR, coef=2.0, layer=3), r"from_tensor\(tensor, layer=3\)"),
    (lambda e: sl.add(VECTOR, coef=2.0, token_pos=-1), "use where="),
    (lambda e: sl.perplexity(e, "Hi there", texts="x"), "its arguments are engine, text_or_ids"),
    (lambda e: sl.create_steering_hook(torch.ones(4), coefficient=1.0), "use alpha="),
    (
        lambda e: sl.hooked_generate(e.model, torch.tensor([[5]]), layer_name=[], max_new_tokens=3),
        "use max_tokens=",
    ),
    (lambda e: sl.Experiment.effect(None, PLAN, None, [0, 1], n_random=5), r"sl\.Controls\(random=5\)"),
    (lambda e: sl.Experiment.effect(None, PLAN, None, coefficient=[0, 1]), "use plan=|use doses="),
    (lambda e: sl.Experiment.generate(None, PLAN, "Hi", temperature=1), r"SamplingPolicy\(temperature=1\)"),
    (lambda e: sl.SequenceProcessor.generate_batched(None, "Hi", num_return_sequences=2), "use G="),
    (lambda e: sl.SequenceProcessor.generate_batched(None, "Hi", batch_size=2), "use gen_batch_size="),
    (lambda e: sl.SequenceProcessor.generate_batched(None, "Hi", 1, top_p=0.9), r"GenerationConfig\(top_p=0\.9\)"),
    (lambda e: sl.SequenceProcessor.generate_batched(None, "Hi", 1, policy=1), "use the processor's config"),
    (lambda e: sl.Experiment.select(None, [], [1], on=None, neutral=["x"]), "use texts="),
    (lambda e: sl.Experiment.effect(None, PLAN, None, [0, 1], texts=["x"]), "use neutral="),
    (lambda e: VLLMEngine.generate(None, "Hi", temperature=0.7), r"policy=sl\.SamplingPolicy\(temperature=0\.7\)"),
    (lambda e: VLLMEngine.generate(None, "Hi", max_tokens=5), "use max_new_tokens="),
    (lambda e: VLLMEngine.score(None, "Hi", target=["a"]), "use targets="),
    (lambda e: VLLMEngine("smollm2-135m", layer=3), "use layers="),
    (lambda e: RepControl.__call__(None, "Hi", alpha=2.0), "use coefficient="),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_foreign_name_is_answered_with_ours(tiny_llama_engine, case):
    call, message = CASES[case]
    with pytest.raises(TypeError, match=message):
        call(tiny_llama_engine)


def test_signatures_stay_what_they_are():
    assert list(inspect.signature(sl.add).parameters)[:4] == ["vector", "unnamed", "dose", "coef"]
    assert inspect.isgeneratorfunction(inspect.unwrap(sl.LensEngine.stream))


def test_every_hint_can_be_written():
    for name, words in INSTEAD.items():
        assert all(hint.format(name=name, value="1") for hint in words.values())


def test_hooks_are_for_the_lens_engine_alone():
    class Elsewhere:
        info = None

    with pytest.raises(sl.PlanError, match=r"Elsewhere has no such model.*generate\(prompts, plan=plan\)"):
        PLAN.hooks(Elsewhere())


def test_a_plain_vllm_engine_is_refused_by_name():
    class LLM:
        def generate(self): ...

        def score(self): ...

    with pytest.raises(sl.InputError, match=r"SequenceProb takes a sl\.VLLMEngine, or a vllm\.LLM .*; got LLM"):
        check_vllm_engine(LLM(), "SequenceProb")
