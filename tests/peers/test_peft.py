"""Scoring and sampling with real PEFT adapters, to be run by `make test-peers` in its own environment."""

import copy
import importlib.util
import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.sequences import BatchedSequences, SequenceProcessor

missing = importlib.util.find_spec("peft") is None
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError("not installed: peft")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(missing, reason="peft not in this environment; `make test-peers` makes one with it"),
]

POLICY = {"generation": {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 12}}


@pytest.fixture
def base(tiny_llama_path):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32).eval()


@pytest.fixture
def tokenizer(tiny_llama_path):
    return AutoTokenizer.from_pretrained(tiny_llama_path)


@pytest.fixture
def adapt(base):
    """A function that puts a LoRA adapter, with both factors random, on a copy of the base model."""

    def make(**more):
        from peft import LoraConfig, get_peft_model

        options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return get_peft_model(copy.deepcopy(base), LoraConfig(**{**options, **more})).eval()

    return make


@pytest.fixture
def adapted(adapt):
    model = adapt()
    assert all(p.abs().max() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    return model


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(3)

    def ids(n):
        return torch.randint(5, 200, (n,), generator=generator).tolist()

    return BatchedSequences.from_ids([ids(4), ids(9)], [[ids(7), ids(1)], [ids(5), ids(12)]])


def flat(nested):
    return np.concatenate([torch.as_tensor(values).detach().numpy() for row in nested for values in row])


def measured(model, tokenizer, sequences, **more):
    """Log p and RB entropy of every token."""
    found = SequenceProcessor(model, tokenizer, config=POLICY).teacher_force_logprobs(
        sequences, compute_rb=True, **more
    )
    return np.stack([flat(found.logprobs), flat(found.rb_entropies)])


def total(results):
    return sum(values.sum() for row in results.logprobs for values in row)


def factors(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"use_dora": True}, {"target_modules": "all-linear", "lora_alpha": 4}], ids=["lora", "dora", "all"]
)
def test_equals_the_merged_model(base, adapt, tokenizer, sequences, with_grad, more):
    model = adapt(**more)
    merged = copy.deepcopy(model).merge_and_unload()
    found = measured(model, tokenizer, sequences, with_grad=with_grad)
    np.testing.assert_allclose(found, measured(merged, tokenizer, sequences), atol=1e-5)
    assert np.abs(found - measured(base, tokenizer, sequences)).max() > 0.01


def test_equals_the_merged_model_under_a_plan(adapted, tokenizer, sequences):
    vector = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(1)), layer=1)
    plan = sl.Plan(sl.add(vector, dose=0.5))
    merged = copy.deepcopy(adapted).merge_and_unload()
    found = measured(adapted, tokenizer, sequences, plan=plan)
    np.testing.assert_allclose(found, measured(merged, tokenizer, sequences, plan=plan), atol=1e-5)
    assert np.abs(found - measured(adapted, tokenizer, sequences)).max() > 0.01


def test_gradients_reach_the_adapter_alone(adapted, tokenizer, sequences):
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    processor = SequenceProcessor(adapted, tokenizer, config=POLICY)
    total(processor.teacher_force_logprobs(sequences, with_grad=True)).backward()
    reached = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
    assert reached.keys() == factors(adapted).keys()
    assert all(gradient.abs().max() > 0 for gradient in reached.values())
    assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters())


def test_gradients_are_those_of_the_models_own_forward(adapted, tokenizer, sequences):
    processor = SequenceProcessor(adapted, tokenizer)
    found = torch.autograd.grad(
        total(processor.teacher_force_logprobs(sequences, with_grad=True)), list(factors(adapted).values())
    )
    loss = 0
    for b in range(2):
        for g in range(2):
            prompt, response = sequences.prompt_ids(b), sequences.response_ids(b, g)
            logits = adapted(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            loss += logits.log_softmax(-1)[range(len(response)), response].sum()
    expected = torch.autograd.grad(loss, list(factors(adapted).values()))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize("with_grad", [False, True])
def test_an_override_of_the_adapter_equals_a_change_in_place(adapted, tokenizer, sequences, with_grad):
    generator = torch.Generator().manual_seed(5)
    v = {name: torch.randn(p.shape, generator=generator) for name, p in factors(adapted).items()}
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    processor = SequenceProcessor(adapted, tokenizer, config=POLICY)
    found = flat(
        processor.teacher_force_logprobs(
            sequences, with_grad=with_grad, params_override=processor.params_override(v, 0.02)
        ).logprobs
    )
    assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters())
    moved = copy.deepcopy(adapted)
    with torch.no_grad():
        for name, p in factors(moved).items():
            p.add_(0.02 * v[name])
    np.testing.assert_allclose(found, measured(moved, tokenizer, sequences)[0], atol=1e-5)
    assert np.abs(found - measured(adapted, tokenizer, sequences)[0]).max() > 1e-3


def test_an_override_is_differentiable_in_eta(adapted, tokenizer, sequences):
    processor = SequenceProcessor(adapted, tokenizer)
    v = {name: torch.ones_like(p) for name, p in factors(adapted).items()}
    eta = torch.tensor(0.0, requires_grad=True)
    found = processor.teacher_force_logprobs(
        sequences, with_grad=True, params_override=processor.params_override(v, eta)
    )
    (slope,) = torch.autograd.grad(total(found), eta)
    plain = processor.teacher_force_logprobs(sequences, with_grad=True)
    by_parameter = torch.autograd.grad(total(plain), list(factors(adapted).values()))
    expected = sum(gradient.double().sum() for gradient in by_parameter)
    assert slope.item() == pytest.approx(expected.item(), rel=1e-3)


def test_a_disabled_adapter_gives_the_reference_policy(base, adapted, tokenizer, sequences):
    processor = SequenceProcessor(adapted, tokenizer, config=POLICY)
    first = flat(processor.teacher_force_logprobs(sequences).logprobs)
    with adapted.disable_adapter():
        off = flat(processor.teacher_force_logprobs(sequences).logprobs)
        graph = flat(processor.teacher_force_logprobs(sequences, with_grad=True).logprobs)
    expected = measured(base, tokenizer, sequences)[0]
    np.testing.assert_allclose(off, expected, atol=1e-5)
    np.testing.assert_allclose(graph, expected, atol=1e-5)
    np.testing.assert_array_equal(flat(processor.teacher_force_logprobs(sequences).logprobs), first)
    assert np.abs(first - expected).max() > 0.01


def test_the_active_one_of_two_adapters(adapted, tokenizer, sequences):
    from peft import LoraConfig

    processor = SequenceProcessor(adapted, tokenizer, config=POLICY)
    first = flat(processor.teacher_force_logprobs(sequences).logprobs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        adapted.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    adapted.set_adapter("other")
    other = flat(processor.teacher_force_logprobs(sequences).logprobs)
    merged = copy.deepcopy(adapted).merge_and_unload()
    np.testing.assert_allclose(other, measured(merged, tokenizer, sequences)[0], atol=1e-5)
    assert np.abs(other - first).max() > 0.01
    adapted.set_adapter("default")
    np.testing.assert_array_equal(flat(processor.teacher_force_logprobs(sequences).logprobs), first)


@pytest.mark.parametrize(
    "more",
    [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}],
    ids=["lora", "saved"],
)
def test_adapters_on_the_head_are_refused_by_name(adapt, tokenizer, more):
    with pytest.raises(InputError, match=r"head of LlamaForCausalLM is a peft\.\S+, not a plain torch Linear"):
        SequenceProcessor(adapt(**more), tokenizer)


def test_an_adapter_put_on_the_head_later_is_refused(adapted, tokenizer, sequences):
    from peft import LoraConfig

    processor = SequenceProcessor(adapted, tokenizer)
    adapted.add_adapter("head", LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(InputError, match="head of LlamaForCausalLM was replaced"):
        processor.teacher_force_logprobs(sequences)


def test_prompt_learning_is_refused(base, tokenizer):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(InputError, match="Prompt-learning adapters"):
        SequenceProcessor(model, tokenizer)


def test_dropout_of_an_adapter_is_off_without_gradients_and_warned_of_with(adapt, tokenizer, sequences):
    model = adapt(lora_dropout=0.5)
    exact = measured(model, tokenizer, sequences)
    model.train()
    np.testing.assert_array_equal(measured(model, tokenizer, sequences), exact)
    with pytest.warns(UserWarning, match="training mode and has dropout"):
        measured(model, tokenizer, sequences, with_grad=True)


def test_sampling_draws_from_the_adapted_model(base, adapted, tokenizer):
    processor = SequenceProcessor(adapted, tokenizer, config=POLICY)
    prompts = ["The ferry leaves", "She opened the window, because"]
    drawn = processor.generate_batched(prompts, 4, seed=0)
    scored = processor.teacher_force_logprobs(drawn)
    np.testing.assert_allclose(flat(scored.token_logqs), flat(drawn.sampler_logqs), atol=1e-4)
    merged = SequenceProcessor(copy.deepcopy(adapted).merge_and_unload(), tokenizer, config=POLICY)
    again = merged.generate_batched(prompts, 4, seed=0)
    assert [again.response_ids(b, g) for b in range(2) for g in range(4)] == [
        drawn.response_ids(b, g) for b in range(2) for g in range(4)
    ]
    with adapted.disable_adapter():
        reference = processor.generate_batched(prompts, 4, seed=0)
    plain = SequenceProcessor(base, tokenizer, config=POLICY).generate_batched(prompts, 4, seed=0)
    assert torch.equal(reference.sequences, plain.sequences)
    assert not torch.equal(reference.sequences, drawn.sequences)


def test_half_precision_weights_under_a_wide_adapter(tiny_llama_path, tokenizer, sequences):
    from peft import LoraConfig, get_peft_model

    narrow = AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.bfloat16).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(narrow, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    assert {p.dtype for p in factors(model).values()} == {torch.float32}
    exact = measured(copy.deepcopy(model).float().merge_and_unload(), tokenizer, sequences)
    np.testing.assert_allclose(measured(model, tokenizer, sequences), exact, atol=1e-5)
    total(SequenceProcessor(model, tokenizer).teacher_force_logprobs(sequences, with_grad=True)).backward()
    assert all(p.grad.isfinite().all() for p in factors(model).values())
