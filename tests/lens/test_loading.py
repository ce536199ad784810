import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab._runtime import weights
from steerlab._runtime.weights import hash_of_weights, parameters_hash
from steerlab.core.errors import InputError, ModelNotFoundError
from steerlab.models import _hashing


@pytest.fixture(scope="module")
def bridge(tiny_llama_path):
    return TransformerBridge.boot_transformers(str(tiny_llama_path), dtype=torch.float32, device="cpu")


def test_a_loaded_bridge_is_used_as_it_is_without_an_added_bos(bridge, tiny_llama_engine):
    engine = sl.load(bridge)
    assert engine.model is bridge
    bos = engine.tokenizer.bos_token_id
    assert bridge.tokenizer("Hi")["input_ids"][0] == bos  # TransformerLens changed its own copy
    out = engine.generate("Hi", max_new_tokens=1)
    assert bos not in out.prompt_token_ids[0]
    assert torch.equal(engine.logits("Hi there"), tiny_llama_engine.logits("Hi there"))


def test_a_loaded_bridge_is_identified_by_its_parameters(bridge):
    info = sl.load(bridge).info
    assert info.weights_hash == parameters_hash(bridge.original_model)
    assert info.n_layers == 4


@pytest.fixture
def large(monkeypatch, tiny_llama_path):
    """A model in memory that counts as too large to be read whole."""
    monkeypatch.setattr(_hashing, "SAMPLED_OVER", 0)
    monkeypatch.setattr(weights, "_PARTS", 4)
    monkeypatch.setattr(weights, "_PART", 8)
    return AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32)


def test_a_large_model_in_memory_is_its_files_by_samples(large, tiny_llama_path):
    assert hash_of_weights(large) == _hashing.weights_hash(tiny_llama_path)
    with torch.no_grad():
        large.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    assert hash_of_weights(large) == parameters_hash(large) != _hashing.weights_hash(tiny_llama_path)


def test_a_large_model_in_memory_is_identified_by_samples_of_every_parameter(large):
    before = parameters_hash(large)
    weight = large.model.layers[2].self_attn.q_proj.weight
    with torch.no_grad():
        weight.view(-1)[9] += 1.0  # between two samples
        assert parameters_hash(large) == before
        for parameter in large.parameters():
            kept = parameter.clone()
            parameter.add_(1e-3)
            assert parameters_hash(large) != before
            parameter.copy_(kept)
        assert parameters_hash(large) == before
        weight.view(-1)[-1] += 1.0
    assert parameters_hash(large) != before


def test_another_tokenizer_may_be_given(bridge, tiny_gpt2_engine):
    assert sl.load(bridge, tokenizer=tiny_gpt2_engine.tokenizer).tokenizer is tiny_gpt2_engine.tokenizer


def test_a_bridge_without_tokenizer_says_what_to_pass(bridge, monkeypatch):
    monkeypatch.setattr(bridge, "tokenizer", None)
    with pytest.raises(InputError, match="tokenizer="):
        sl.load(bridge)


def test_compatibility_mode_is_recorded(tiny_gpt2_path):
    bridge = TransformerBridge.boot_transformers(str(tiny_gpt2_path), dtype=torch.float32, device="cpu")
    before = sl.load(bridge).info
    bridge.enable_compatibility_mode(disable_warnings=True)
    after = sl.load(bridge).info
    assert (before.weight_processing, after.weight_processing) == ("none", "compatibility_mode")


def test_quantised_weights_are_recorded(tiny_gpt2_path, monkeypatch):
    """They were said to be plain, so that a vector of plain weights was taken for one of these."""
    bridge = TransformerBridge.boot_transformers(str(tiny_gpt2_path), dtype=torch.float32, device="cpu")
    stated = {"quant_method": "gptq", "bits": 4}
    monkeypatch.setattr(bridge.original_model.config, "quantization_config", stated, raising=False)
    assert sl.load(bridge).info.weight_processing == "gptq 4-bit"
    bridge.enable_compatibility_mode(disable_warnings=True)
    assert sl.load(bridge).info.weight_processing == "gptq 4-bit compatibility_mode"


def test_lack_of_memory_is_no_damaged_file(tiny_llama_path, tiny_llama_engine, monkeypatch):
    def starved(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(TransformerBridge, "boot_transformers", starved)
    for model in (tiny_llama_path, tiny_llama_engine):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            sl.load(model)


def test_unknown_models_say_what_to_do(tmp_path):
    with pytest.raises(ModelNotFoundError):
        sl.load(tmp_path / "no-such-model")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": "float31"},
        {"n_devices": 0},
        {"n_devices": 1.5},
        {"n_devices": 99},
        {"device": "cpu", "n_devices": 2},
        {"device": "cpu", "device_map": "auto"},
    ],
)
def test_bad_options_are_refused(tiny_llama_path, options):
    with pytest.raises(InputError):
        sl.load(tiny_llama_path, **options)


def test_a_torch_dtype_is_as_good_as_its_name(tiny_llama_path):
    with sl.load(str(tiny_llama_path), dtype=torch.bfloat16, device="cpu") as engine:
        assert engine.info.dtype == "bfloat16"


def test_a_checkpoints_generation_config_adds_no_hidden_warper(tiny_llama_engine, monkeypatch):
    config = tiny_llama_engine.model.original_model.generation_config
    before = [c.token_ids for c in tiny_llama_engine.generate("Hi", max_new_tokens=4, n=8)]
    monkeypatch.setattr(config, "top_k", 1)
    monkeypatch.setattr(config, "do_sample", False)
    assert [c.token_ids for c in tiny_llama_engine.generate("Hi", max_new_tokens=4, n=8)] == before
