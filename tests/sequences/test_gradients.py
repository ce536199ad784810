import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from steerlab._runtime.model_parts import LogitTransform
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.sequences import SequenceProcessor
from steerlab.sequences._head import HeadSpec, measure_head
from tests.sequences.helpers import enumerated

HIDDEN = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
TOKENS = torch.tensor([0, 3, 8, 2, 2, 5, 7])


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(temperature=0.7), SamplingPolicy(1.3, 0.7)])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(multiplier=0.3, divisor=2.0, softcap=1.5)])
@pytest.mark.parametrize("rows", [None, 3])
def test_the_head(policy, transform, rows):
    spec = HeadSpec(transform, policy, chunk_rows=rows)

    def outputs(hidden, weight, bias):
        found = measure_head(spec, hidden, weight, bias, TOKENS)
        inside = found.log_qs.isfinite()
        return found.log_probs, found.log_qs[inside], found.entropies

    leaves = [values.clone().requires_grad_() for values in (HIDDEN, WEIGHT, BIAS)]
    assert gradcheck(outputs, leaves)


def test_the_head_equals_autograd_on_materialised_logits():
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    found = measure_head(HeadSpec(LogitTransform(), SamplingPolicy()), hidden, weight, None, TOKENS)
    ours = torch.autograd.grad((found.log_probs * torch.arange(7)).sum() + found.entropies.sum(), (hidden, weight))
    log_p = (hidden @ weight.T).log_softmax(-1)
    loss = (log_p[range(7), TOKENS] * torch.arange(7)).sum() - (log_p.exp() * log_p).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("generation", [{}, {"temperature": 0.7, "top_p": 0.8}])
def test_through_the_model_and_eta(three_tokens, generation):
    model, tokenizer = three_tokens
    config = {"generation": {**generation, "rb_requires_grad": True}}
    processor = SequenceProcessor(model, tokenizer, config=config)
    sequences = enumerated([0, 1, 1], 2)
    names = ["lm_head.weight", "transformer.h.1.ln_1.weight"]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name in names}
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(shapes[name], dtype=torch.float64, generator=generator) for name in names]

    def outputs(eta, *v):
        override = processor.params_override(dict(zip(names, v, strict=True)), eta)
        results = processor.teacher_force_logprobs(sequences, with_grad=True, compute_rb=True, params_override=override)
        log_q = torch.cat(results.token_logqs[0])
        return torch.cat(results.logprobs[0]), log_q[log_q.isfinite()], torch.cat(results.rb_entropies_torch[0])

    leaves = [torch.tensor(0.1, dtype=torch.float64), *directions]
    assert gradcheck(outputs, [leaf.clone().requires_grad_() for leaf in leaves])


def test_gradients_of_the_live_model(make_processor, sequences):
    processor = make_processor(temperature=0.8)
    model = processor.parts.causal
    results = processor.teacher_force_logprobs(sequences, with_grad=True)
    sum(values.sum() for row in results.logprobs for values in row).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for b in range(2):
        for g in range(3):
            prompt, response = sequences.prompt_ids(b, g), sequences.response_ids(b, g)
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            total = total + logits.log_softmax(-1)[range(len(response)), response].sum()
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_with_and_without_gradients_agree(make_processor, sequences):
    processor = make_processor(top_p=0.9)
    plain = processor.teacher_force_logprobs(sequences, compute_rb=True)
    graph = processor.teacher_force_logprobs(sequences, with_grad=True, compute_rb=True)
    for b in range(2):
        for g in range(3):
            torch.testing.assert_close(graph.logprobs[b][g].detach(), plain.logprobs[b][g], atol=1e-5, rtol=0)
            np.testing.assert_allclose(graph.rb_entropies[b][g], plain.rb_entropies[b][g], atol=1e-5)
    assert graph.logprobs[0][0].requires_grad
    assert graph.token_logqs[0][0].requires_grad


@pytest.mark.parametrize("keep", [True, False])
def test_rb_requires_grad(make_processor, sequences, keep):
    results = make_processor(rb_requires_grad=keep).teacher_force_logprobs(sequences, with_grad=True, compute_rb=True)
    assert results.rb_entropies_torch[0][0].requires_grad is keep
    np.testing.assert_array_equal(results.rb_entropies_torch[0][0].detach(), results.rb_entropies[0][0])


def test_features_are_detached(make_processor, sequences):
    results = make_processor().teacher_force_logprobs(sequences, with_grad=True, return_baseline_features=True)
    assert not results.baseline_feats_torch[0][0].requires_grad


def test_gradient_checkpointing(make_processor, sequences):
    processor = make_processor()
    model = processor.parts.causal
    expected = _head_gradient(processor, sequences)
    model.train()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(_head_gradient(processor, sequences), expected)  # without override or plan it is sound
    override = processor.params_override({}, 0.0)
    with pytest.raises(InputError, match="Gradient checkpointing"):
        processor.teacher_force_logprobs(sequences, with_grad=True, params_override=override)
    processor.teacher_force_logprobs(sequences, params_override=override)


def _head_gradient(processor, sequences):
    results = processor.teacher_force_logprobs(sequences, with_grad=True)
    total = sum(values.sum() for row in results.logprobs for values in row)
    return torch.autograd.grad(total, processor.parts.causal.model.layers[0].mlp.up_proj.weight)[0]


def test_dropout_is_off_without_gradients_and_told_of_with_them(make_processor, sequences):
    processor = make_processor()
    model = processor.parts.causal
    expected = processor.teacher_force_logprobs(sequences).logprobs[0][0]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    torch.testing.assert_close(processor.teacher_force_logprobs(sequences).logprobs[0][0], expected)
    with pytest.warns(UserWarning, match="dropout"):
        processor.teacher_force_logprobs(sequences, with_grad=True)


def test_a_token_outside_the_nucleus_has_no_gradient_by_log_q(make_processor, sequences):
    processor = make_processor(top_p=0.05)
    results = processor.teacher_force_logprobs(sequences, with_grad=True)
    assert results.outside_nucleus[0][2].any()
    results.token_logqs[0][2].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in processor.parts.causal.parameters())
