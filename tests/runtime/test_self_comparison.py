"""Comparisons of a model with itself: rounding is let through, real faults are not."""

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from steerlab._runtime.growth import growth_of
from steerlab._runtime.model_state import state_of
from steerlab._runtime.self_comparison import is_out_of_memory, ordinary_tokens, rounding_of
from steerlab.measures._rounding import Rounding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
N_TOKENS, SHALLOW, DEEP = 12, 4, 48


def build(n_layers):
    """A random Qwen2, whose attention has biases."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(vocab_size=384, num_hidden_layers=n_layers, initializer_range=0.2, **sizes)
        model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    return model


@pytest.fixture(scope="module", params=[SHALLOW, DEEP])
def model(request):
    return build(request.param)


@torch.no_grad()
def logits_of(model, **options):
    tokens = ordinary_tokens(model, 2 * N_TOKENS)
    ids = torch.tensor([tokens[::2], tokens[:N_TOKENS]])
    return model(input_ids=ids, use_cache=False, **options).logits


def swapped_layers(model):
    layers = model.model.layers
    middle = len(layers) // 2
    layers[middle], layers[middle - 1] = layers[middle - 1], layers[middle]
    return logits_of(model)


def another_rotary_base(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = 1 / 1e6 ** (torch.arange(0, 16, 2) / 16)
    return logits_of(model)


def positions_off_by_one(model):
    positions = torch.arange(N_TOKENS)[None].repeat(2, 1)
    positions[:, N_TOKENS // 2 :] += 1
    return logits_of(model, position_ids=positions)


def no_bias(model):
    model.model.layers[len(model.model.layers) // 2].self_attn.v_proj.bias = None
    return logits_of(model)


def one_row_of_another_text(model):
    found = logits_of(model)
    return torch.stack([found[0], found[1].roll(1, dims=0)])


FAULTS = [swapped_layers, another_rotary_base, positions_off_by_one, no_bias, one_row_of_another_text]
CASES = [
    (n_layers, fault, dtype)
    for n_layers in (SHALLOW, DEEP)
    for fault in FAULTS
    for dtype in DTYPES
    # one of 48 random layers changes less than rounding in bfloat16 does
    if (n_layers, dtype) != (DEEP, torch.bfloat16) or fault not in (swapped_layers, no_bias)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_in_a_coarser_dtype_is_the_same_model(model, dtype):
    coarse = copy.deepcopy(model).to(dtype)
    wanted = logits_of(model)
    rounding = rounding_of(coarse)
    assert rounding == Rounding(dtype, len(model.model.layers))
    assert rounding.excess(logits_of(coarse), wanted) < 0.5
    coarse.set_attn_implementation("eager")
    assert rounding.explains(logits_of(coarse).float(), wanted)  # logits that were widened say nothing of the model


@pytest.mark.parametrize(("model", "fault", "dtype"), CASES, indirect=["model"])
def test_a_fault_is_no_rounding(model, fault, dtype):
    coarse = copy.deepcopy(model).to(dtype)
    assert not rounding_of(coarse).explains(fault(coarse), logits_of(model))


def test_the_real_model_in_half_precision_is_the_same_model(smollm2_path):
    wide = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    assert rounding_of(narrow).explains(logits_of(narrow), logits_of(wide))
    assert not rounding_of(narrow).explains(swapped_layers(narrow), logits_of(wide))


def test_what_is_allowed_is_steps_that_add_up_as_a_random_walk():
    assert Rounding(torch.bfloat16, 12).allowed == 4 * 2**-7 * 5
    assert Rounding(torch.float16, 12).allowed == Rounding(torch.bfloat16, 12).allowed / 8
    assert Rounding(torch.float32, 0).allowed == 4 * 2**-15
    assert Rounding(torch.bfloat16, 10_000).allowed == 0.5  # others differ by more than half their spread


def test_the_measure_by_hand():
    rounding = Rounding(torch.float32, 0)
    wanted = torch.tensor([[[1.0, -1.0], [3.0, 1.0]]], dtype=torch.float64)  # spread 1 at both positions
    found = wanted + torch.tensor([[[1e-3, 1e-3], [0.0, 0.0]]])
    # of logits of size 1, 2⁻¹⁵ is their own rounding; half of the rest is the mean over two positions
    assert rounding.excess(found, wanted) == pytest.approx((1e-3 - 2**-15) / 2 / (4 * 2**-15))
    assert rounding.excess(wanted, wanted) == 0
    assert rounding.excess(wanted[:, :1], wanted) == math.inf
    assert not rounding.explains(found.where(found < 3, torch.nan), wanted)
    never = wanted.where(wanted != -1, -math.inf)  # a token that the model rules out
    assert rounding.explains(never, never)
    flat = torch.zeros(1, 2, 5)
    assert rounding.explains(flat, flat)
    assert not rounding.explains(flat + torch.arange(5), flat)


def test_one_row_among_many_may_not_be_another_text():
    rounding, wanted = Rounding(torch.bfloat16, 30), torch.randn(33, 4, 50, generator=torch.Generator().manual_seed(0))
    found = wanted.clone()
    found[20] = found[20].roll(1, dims=-1)
    assert (found - wanted).norm() < rounding.allowed * wanted.norm()
    assert not rounding.explains(found, wanted)


def test_float32_that_is_multiplied_more_coarsely_may_differ_more():
    fine = Rounding(torch.float32, 4).allowed
    torch.set_float32_matmul_precision("high")
    try:
        assert Rounding(torch.float32, 4).allowed == 32 * fine == Rounding(torch.float16, 4).allowed
        assert Rounding(torch.float64, 4).allowed == fine
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tokens_are_from_all_over_the_vocabulary(model):
    tokens = ordinary_tokens(model, 7)
    assert tokens == [48, 96, 144, 192, 240, 288, 336]


def test_lack_of_memory_is_known_by_type_or_words():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50)
    assert is_out_of_memory(refused.value)
    for error in (torch.OutOfMemoryError(), MemoryError(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("The size of tensor a must match"))
    assert not is_out_of_memory(KeyError("out of memory"))


def test_a_trial_without_memory_is_no_verdict(monkeypatch):
    """Every later call ran rows whole, as if the model had no cache."""
    model = build(SHALLOW)
    model.config.model_type = "something_else"
    forward = model.forward

    def starved(past_key_values=None, **given):
        if past_key_values is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(past_key_values=past_key_values, **given)

    monkeypatch.setattr(model, "forward", starved)
    with pytest.raises(torch.OutOfMemoryError):
        growth_of(model)
    assert state_of(model).known == {}
    monkeypatch.undo()
    assert growth_of(model).steps
