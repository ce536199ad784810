from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.sequences import GenerationConfig, ProcessorConfig, SequenceProcessor
from steerlab.sequences._head import HeadSpec
from steerlab.sequences.config import PrecisionConfig


def test_documented_defaults():
    config = ProcessorConfig.of(None)
    assert config.generation == GenerationConfig(1.0, 1.0, 200, True, 8, 32, 8, False)
    precision = config.precision
    switched = (precision.allow_tf32, precision.entropy_fp64, precision.func_override.autocast)
    assert switched == (False, False, False)
    assert precision.matmul_precision == "highest"
    assert precision.func_override.cast_params
    assert precision.tf_nograd.cast_logits_fp32
    assert {part.dtype for part in (precision.func_override, precision.tf_nograd, precision.tf_withgrad)} == {
        torch.float32
    }


def test_forms():
    generation = GenerationConfig(top_p=0.9)
    assert ProcessorConfig.of(generation).generation is generation
    nested = ProcessorConfig.of({"generation": generation, "precision": {"tf_nograd": {"dtype": "bfloat16"}}})
    assert nested.generation is generation
    assert nested.precision.tf_nograd.dtype == torch.bfloat16
    assert ProcessorConfig.of(nested) is nested
    assert ProcessorConfig.of({"precision": PrecisionConfig(entropy_fp64=True)}).precision.entropy_fp64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"generate": {}}, "config has no key 'generate'; its keys are generation, precision"),
        ({"generation": {"topp": 1}}, "generation has no key 'topp'"),
        ({"precision": {"fp64": True}}, "precision has no key 'fp64'"),
        ({"precision": {"tf_nograd": {"cast": True}}}, r"precision\.tf_nograd has no key 'cast'"),
        ({"precision": {"func_override": {"cast_logits_fp32": True}}}, "has no key 'cast_logits_fp32'"),
        ({"precision": {"tf_withgrad": 3}}, "is a dictionary or a ForcingPrecision"),
        ({"precision": {"tf_withgrad": {"dtype": "int8"}}}, "A dtype is one of"),
        ({"precision": {"matmul_precision": "low"}}, "matmul_precision is one of"),
        ({"precision": {"matmul_precision": "high"}}, "set allow_tf32=True too"),
        ({"precision": {"entropy_fp64": 1}}, "entropy_fp64 is True or False"),
        ({"generation": {"gen_batch_size": 0}}, "gen_batch_size is an integer ≥ 1"),
        ({"generation": {"max_new_tokens": -1}}, "max_new_tokens is an integer ≥ 0"),
        ({"generation": {"do_sample": "yes"}}, "do_sample is True or False"),
        (3, "config is a GenerationConfig or a dictionary"),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        ProcessorConfig.of(config)


def test_policy():
    assert GenerationConfig(temperature=0.5, top_p=0.3).policy == SamplingPolicy(0.5, 0.3)
    assert GenerationConfig(do_sample=False, temperature=0.5).policy == SamplingPolicy.greedy()
    assert GenerationConfig(temperature=0).policy.is_greedy
    with pytest.raises(PolicyError):
        GenerationConfig(top_p=0)


def test_a_new_configuration_holds_for_scoring_too(make_processor, sequences):
    """A temperature set after construction sampled at it and scored log q at the old one."""
    changed, fresh = make_processor(), make_processor(temperature=0.5, precision={"entropy_fp64": True})
    changed.config = fresh.config
    expected = fresh.teacher_force_logprobs(sequences, compute_rb=True)
    found = changed.teacher_force_logprobs(sequences, compute_rb=True)
    for name in ("token_logqs", "rb_entropies"):
        for ours, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
                assert torch.as_tensor(one).dtype == torch.as_tensor(other).dtype
    changed.config = {"generation": {"max_new_tokens": 3}}
    assert changed.config == ProcessorConfig(GenerationConfig(max_new_tokens=3))
    assert changed.scorer.config is changed.config


NARROW = {"dtype": "bfloat16", "autocast": True}
CHANGES = [
    {"generation": {"temperature": 0.6}},
    {"generation": {"top_p": 0.3}},
    {"generation": {"max_new_tokens": 3}},
    {"generation": {"do_sample": False}},
    {"generation": {"num_return_sequences": 2}},
    {"generation": {"gen_batch_size": 2}},
    {"generation": {"tf_batch_size": 2}},
    {"generation": {"rb_requires_grad": True}},
    {"precision": {"func_override": NARROW}},
    {"precision": {"func_override": {"dtype": "float64"}}},
    {"precision": {"func_override": {"cast_params": False}}},
    {"precision": {"tf_nograd": NARROW}},
    {"precision": {"tf_nograd": {"cast_logits_fp32": False}}},
    {"precision": {"tf_withgrad": NARROW}},
    {"precision": {"tf_withgrad": {"cast_logits_fp32": False}}},
    {"precision": {"allow_tf32": True}},
    {"precision": {"allow_tf32": True, "matmul_precision": "medium"}},
    {"precision": {"entropy_fp64": True}},
]


def leaves(section, prefix=""):
    for entry in fields(section):
        value = getattr(section, entry.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


def named(changes, prefix=""):
    for name, value in changes.items():
        if isinstance(value, dict):
            yield from named(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_list_above_has_every_setting():
    assert {name for change in CHANGES for name in named(change)} == set(leaves(ProcessorConfig()))


def everything_seen(processor, monkeypatch):
    """What sampler, scorer and overrides do: what reaches the model, and what comes out."""
    seen = []

    def look(module, arguments):
        matmul, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.append((len(arguments[0]), matmul, tf32, autocast, module.weight.dtype))

    original = HeadSpec.logits
    handle = processor.parts.causal.get_input_embeddings().register_forward_pre_hook(look)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(HeadSpec, "logits", lambda spec, *a: seen.append(spec.cast_logits) or original(spec, *a))
            drawn, scored, _ = processor.generate_with_logprobs(["The ferry", "Nobody knew"], seed=0, compute_rb=True)
            with_grad = processor.teacher_force_logprobs(drawn, True, compute_rb=True)
            moved = processor.params_override({}, 0.0)
            logits = processor._fc_logits(drawn.sequences[0], drawn.attention_masks[0], moved)
    finally:
        handle.remove()
    found = [drawn.sequences, logits, *moved.values()]
    for results in (scored, with_grad):
        found += [x for rows in (results.token_logqs, results.rb_entropies) for row in rows for x in row]
    found += [x.requires_grad for row in with_grad.rb_entropies_torch for x in row]
    return [*seen, *found, drawn.policy, scored.policy, repr(processor._fo_cfg), repr(processor._tf_cfg)]


def same(one, other):
    if isinstance(one, torch.Tensor | np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def alike(one, other):
    return len(one) == len(other) and all(map(same, one, other))


@pytest.fixture(scope="module")
def bf16_model(tiny_llama_path):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_setting_changed_after_construction_reaches_sampler_scorer_and_overrides(
    make_processor, bf16_model, monkeypatch, change
):
    processor = make_processor(model=bf16_model, max_new_tokens=5)
    views = processor._fo_cfg, processor._tf_cfg
    before = everything_seen(processor, monkeypatch)
    processor.config = processor.config.changed(**change)
    after = everything_seen(processor, monkeypatch)
    fresh = SequenceProcessor(bf16_model, processor.tokenizer, config=processor.config)
    assert alike(after, everything_seen(fresh, monkeypatch))
    assert not alike(after, before)
    assert views[0]["dtype"] == processor.config.precision.func_override.dtype  # views made before are of now
    assert views[1]["tf_nograd"]["autocast"] == processor.config.precision.tf_nograd.autocast


@pytest.mark.parametrize("section", ["generation", "precision", "precision.func_override", "precision.tf_nograd"])
def test_a_setting_changed_in_place_is_refused(make_processor, section):
    processor = make_processor()
    part = processor.config
    for name in section.split("."):
        part = getattr(part, name)
    for name in (entry.name for entry in fields(part)):
        message = rf"{name} cannot be changed in place.*processor\.config\.changed"
        with pytest.raises(AttributeError, match=message):
            setattr(part, name, getattr(part, name))
        with pytest.raises(AttributeError, match=message):
            delattr(part, name)


def test_views_show_and_refuse(make_processor):
    processor = make_processor()
    assert dict(processor._fo_cfg) == {"autocast": False, "dtype": torch.float32, "cast_params": True}
    assert list(processor._tf_cfg) == ["tf_nograd", "tf_withgrad"]
    with pytest.raises(AttributeError, match="autocast cannot be changed in place"):
        processor._tf_cfg["tf_nograd"]["autocast"] = True
    with pytest.raises(KeyError):
        processor._tf_cfg["entropy_fp64"]
    with pytest.raises(InputError, match=r"precision\.tf_nograd has no key 'cast'"):
        processor.config.changed(precision={"tf_nograd": {"cast": True}})


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_take_effect_cannot_be_set(make_processor, tokenizer):
    processor = make_processor()
    with pytest.raises(InputError, match="config is a GenerationConfig or a dictionary"):
        processor.config = 3
    with pytest.raises(AttributeError):
        processor.config.generation.temperature = 0.5
    for name in ("top_p", "max_new_tokens", "generation", "precision", "entropy_fp64", "func_override"):
        with pytest.raises(AttributeError, match=rf"SequenceProcessor\.{name} cannot .*processor\.config\.changed"):
            setattr(processor, name, 0.5)
    for name in ("tokenizer", "parts"):
        with pytest.raises(AttributeError):
            setattr(processor, name, getattr(processor, name))
