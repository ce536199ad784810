import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.sequences import BatchedSequences, SequenceProcessor
from tests.sequences.helpers import step_logits
from tests.sequences.test_forcing import flat
from tests.tiny_models import FAMILIES, build_tiny_family

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(5, 90, (n,), generator=generator).tolist()

    return BatchedSequences.from_ids([ids(5), ids(11)], [[ids(9), ids(4)], [ids(7), ids(10)]])


def check(processor, drawn):
    """Log-probs equal the plain model's, row by row; gradients by the decoder's input embedding are finite."""
    found = processor.teacher_force_logprobs(drawn, compute_rb=True)
    for b in range(2):
        for g in range(2):
            response = drawn.response_ids(b, g)
            logits = step_logits(processor.parts.causal, drawn.prompt_ids(b), response)
            expected = logits.log_softmax(-1)[range(len(response)), response]
            torch.testing.assert_close(found.logprobs[b][g], expected, atol=2e-5, rtol=0)
    graph = processor.teacher_force_logprobs(drawn, with_grad=True)
    embedding = processor.parts.causal.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(sum(x.sum() for row in graph.logprobs for x in row), embedding)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    return found


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family(tmp_path, tokenizer, drawn, name):
    kernel = {"attn_implementation": "eager"} if name.startswith("gemma2") else {}
    path = build_tiny_family(tmp_path / name, name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kernel).eval()
    processor = SequenceProcessor(model, tokenizer, config={"generation": {"top_p": 0.9, "max_new_tokens": 10}})
    plain = check(processor, drawn)
    vector = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(2)), layer=1)
    steered = processor.teacher_force_logprobs(drawn, plan=sl.Plan(sl.add(vector, coef=2.0)))
    assert np.abs(flat(steered.logprobs) - flat(plain.logprobs)).max() > 1e-3
    sampled = processor.generate_batched([drawn.prompt_ids(0), drawn.prompt_ids(1)], 2, seed=0)
    scored = processor.teacher_force_logprobs(sampled)
    np.testing.assert_allclose(flat(scored.token_logqs), flat(sampled.sampler_logqs), atol=1e-4)


def build(config_class, model_class, **values):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(config_class(**_SIZES, **values)).eval()


@pytest.mark.parametrize(
    ("make", "transform"),
    [
        (lambda: build(CohereConfig, CohereForCausalLM, logit_scale=0.25), {"multiplier": 0.25}),
        (lambda: build(GraniteConfig, GraniteForCausalLM, logits_scaling=3.0), {"divisor": 3.0}),
    ],
    ids=["cohere", "granite"],
)
def test_families_that_scale_their_logits(tokenizer, drawn, make, transform):
    processor = SequenceProcessor(make(), tokenizer)
    assert {name: getattr(processor.parts.transform, name) for name in transform} == transform
    check(processor, drawn)


def test_a_model_that_does_something_else_to_its_logits_is_refused(make_model, tokenizer):
    model = make_model()
    plain = model.forward

    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits.clamp(max=1.0)
        return output

    model.forward = forward
    with pytest.raises(InputError, match="LlamaForCausalLM does something to its logits"):
        SequenceProcessor(model, tokenizer)


def test_a_head_that_is_not_plain_is_refused(make_model, tokenizer):
    class Odd(torch.nn.Linear):
        pass

    model = make_model()
    head = Odd(*model.lm_head.weight.T.shape, bias=False)
    model.set_output_embeddings(head)
    with pytest.raises(InputError, match=r"is a tests\S+\.Odd, not a plain torch Linear"):
        SequenceProcessor(model, tokenizer)


def test_half_precision(tmp_path, make_processor, sequences):
    wide, narrow = make_processor(), make_processor(torch.bfloat16)
    exact = flat(wide.teacher_force_logprobs(sequences).logprobs)
    widened = flat(narrow.teacher_force_logprobs(sequences).logprobs)  # bfloat16 weights run in float32
    live = narrow.teacher_force_logprobs(sequences, with_grad=True)
    assert live.logprobs[0][0].dtype == torch.float32
    assert np.abs(widened - exact).max() < 0.5
    assert np.abs(flat(live.logprobs) - widened).max() < 0.5
    sum(x.sum() for row in live.logprobs for x in row).backward()
    assert all(parameter.grad.isfinite().all() for parameter in narrow.parts.root.parameters())


def test_inside_data_parallel_and_compile_wrappers(make_model, tokenizer, sequences):
    model = make_model()
    expected = flat(SequenceProcessor(model, tokenizer).teacher_force_logprobs(sequences).logprobs)
    for wrapped in (torch.nn.DataParallel(model), torch.compile(model)):
        processor = SequenceProcessor(wrapped, tokenizer)
        assert processor.parts.root is model
        np.testing.assert_array_equal(flat(processor.teacher_force_logprobs(sequences).logprobs), expected)


def test_engines_around_a_model_are_refused(make_model, tokenizer):
    class Engine(torch.nn.Module):
        """Passes everything through, as training engines do."""

        def __init__(self, model):
            super().__init__()
            self.module = model

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

    with pytest.raises(InputError, match="Engine shards the model or wraps it in a way that is not known"):
        SequenceProcessor(Engine(make_model()), tokenizer)


def test_offloaded_parameters_are_refused(make_model, tokenizer):
    with pytest.raises(InputError, match=r"'model\.embed_tokens\.weight' of LlamaForCausalLM is on the meta device"):
        SequenceProcessor(make_model().to("meta"), tokenizer)


class LowRank(torch.nn.Module):
    """A linear layer with a low-rank adapter on it."""

    def __init__(self, base):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features, generator=generator) / 4)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2, generator=generator) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(torch.nn.Module):
    """A model with adapters as adapter libraries wrap it: names of its own, everything else passed through."""

    def __init__(self, model, is_prompt_learning=False):
        super().__init__()
        self.base_model = model
        self.peft_config = {"default": type("Config", (), {"is_prompt_learning": is_prompt_learning})()}

    def get_base_model(self):
        return self.base_model

    def get_output_embeddings(self):
        return self.base_model.get_output_embeddings()


def test_adapters_stay_and_go_by_the_adapted_models_names(make_model, tokenizer, sequences):
    plain = flat(SequenceProcessor(make_model(), tokenizer).teacher_force_logprobs(sequences).logprobs)
    model = make_model().requires_grad_(False)
    model.model.layers[1].self_attn.q_proj = LowRank(model.model.layers[1].self_attn.q_proj)
    processor = SequenceProcessor(Adapted(model), tokenizer)
    adapted = processor.teacher_force_logprobs(sequences)
    assert np.abs(flat(adapted.logprobs) - plain).max() > 1e-3
    response = sequences.response_ids(0, 2)
    logits = step_logits(model, sequences.prompt_ids(0), response)
    expected = logits.log_softmax(-1)[range(len(response)), response]
    torch.testing.assert_close(adapted.logprobs[0][2], expected, atol=1e-5, rtol=0)
    name = "base_model.model.layers.1.self_attn.q_proj.up"
    off = processor.params_override({name: processor.parts.root.get_parameter(name).detach()}, -1.0)
    without = processor.teacher_force_logprobs(sequences, params_override=off)
    np.testing.assert_allclose(flat(without.logprobs), plain, atol=1e-5)
    graph = processor.teacher_force_logprobs(sequences, with_grad=True)
    sum(x.sum() for row in graph.logprobs for x in row).backward()
    trained = {n for n, parameter in processor.parts.root.named_parameters() if parameter.grad is not None}
    assert trained == {name, name.replace("up", "down")}


def test_prompt_learning_is_refused(make_model, tokenizer):
    with pytest.raises(InputError, match="Prompt-learning adapters"):
        SequenceProcessor(Adapted(make_model(), is_prompt_learning=True), tokenizer)
