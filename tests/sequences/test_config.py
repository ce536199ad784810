import pytest
import torch

from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.sequences import GenerationConfig, ProcessorConfig
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


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_take_effect_cannot_be_set(make_processor, tokenizer):
    processor = make_processor()
    with pytest.raises(InputError, match="config is a GenerationConfig or a dictionary"):
        processor.config = 3
    with pytest.raises(AttributeError):
        processor.config.generation.temperature = 0.5
    for name in ("tokenizer", "parts"):
        with pytest.raises(AttributeError):
            setattr(processor, name, getattr(processor, name))
