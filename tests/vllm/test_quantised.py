"""Quantised weights scored as they run: nothing is dequantised for the purpose."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl
from steerlab.core.shipped import reference_text
from tests.quantised_models import (
    GROUP,
    SHARED_SCALE,
    build_awq,
    build_fp8,
    build_gptq,
    build_mxfp4,
    build_nvfp4,
    build_w4a16,
    build_w8a8,
    pack_fp8,
    pack_int4,
    pack_int8,
    pack_mxfp4,
    pack_nvfp4,
)
from tests.vllm.conftest import started

CONTEXT, STRIDE = 128, 64


@pytest.fixture(scope="module")
def w8a8(tmp_path_factory):
    return build_w8a8(tmp_path_factory.mktemp("w8a8"))


def reference_nll(path, ids, *, activations=None, dtype=torch.float32, device="cpu"):
    """Mean nll of a text in windows, by Hugging Face's own model and this loop."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    if activations is not None:
        for name, layer in model.named_modules():
            if name.endswith("proj"):
                layer.register_forward_pre_hook(lambda _, args: (activations(args[0]), *args[1:]))
    total, scored, stop = 0.0, 1, min(CONTEXT, len(ids))
    while True:
        start = max(0, stop - CONTEXT)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:stop]], device=device)).logits[0].double().log_softmax(-1)
        total -= sum(logits[k - 1 - start, ids[k]].item() for k in range(scored, stop))
        if stop == len(ids):
            return total / (len(ids) - 1)
        scored, stop = stop, min(stop + STRIDE, len(ids))


def _as_int8(values):
    """What is left of activations after int8 with a scale per token."""
    scale = values.abs().amax(dim=-1, keepdim=True) / 127
    return (values / scale).round().clamp(-128, 127) * scale


def _as_fp8(values):
    """What is left of activations after float8 with a scale per token."""
    scale = values.abs().amax(dim=-1, keepdim=True).float() / 448
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


# --- packing ------------------------------------------------------------------------------------------------------


def test_int4_codes_are_packed_as_the_library_unpacks_them():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    tensors, dequantised = pack_int4(weight)
    codes = helpers.unpack_from_int32(tensors["weight_packed"], 4, torch.Size(tensors["weight_shape"].tolist()))
    scales = tensors["weight_scale"].float().repeat_interleave(GROUP, dim=1)
    assert torch.equal(codes.float() * scales, dequantised)
    assert (dequantised - weight).abs().max() <= scales.max() / 2 * 1.01


def test_int8_codes_stand_for_the_weights():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    tensors, dequantised = pack_int8(weight)
    assert tensors["weight"].dtype == torch.int8
    assert torch.equal(tensors["weight"].float() * tensors["weight_scale"], dequantised)
    assert ((dequantised - weight).abs() <= tensors["weight_scale"] / 2 * 1.01).all()


def test_float4_codes_are_packed_as_the_libraries_unpack_them():
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) / 10
    tensors, dequantised = pack_nvfp4(weight)
    codes = helpers.unpack_fp4_from_uint8(tensors["weight_packed"], 16, 64, dtype=torch.float32)
    scales = (tensors["weight_scale"].float() / SHARED_SCALE).repeat_interleave(16, dim=1)
    assert torch.equal(codes * scales, dequantised)
    assert (dequantised - weight).abs().max() <= scales.max() * 1.1  # half of the widest gap, and float8 of the scale
    experts = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1))
    tensors, dequantised = pack_mxfp4(experts)
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    unpacked = convert_moe_packed_tensors(tensors["blocks"], tensors["scales"], dtype=torch.float32)
    assert torch.equal(unpacked, dequantised)


def test_float8_codes_stand_for_the_weights():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    tensors, dequantised = pack_fp8(weight)
    assert torch.equal(tensors["weight"].float() * tensors["weight_scale"], dequantised)
    assert ((dequantised - weight).abs() <= weight.abs() / 16 + tensors["weight_scale"] * 2.0**-9).all()


# --- on vLLM ------------------------------------------------------------------------------------------------------


def multiplies_int8() -> bool:
    """Whether the processor has instructions for sums of 8-bit products; without, vLLM's kernel cuts sums off."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if Path("/proc/cpuinfo").exists() else []
    return bool({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"} & set(flags))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not multiplies_int8(), reason="vLLM's int8 kernel is not exact on processors without VNNI or AMX")
def test_w8a8_on_the_cpu(w8a8, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # vLLM's kernel for AMX takes no float32
    quantised, twin = w8a8
    ids = AutoTokenizer.from_pretrained(twin)(reference_text())["input_ids"][:400]
    with started(quantised, layers=[1]) as engine:
        found = sl.perplexity(engine, ids, context_length=CONTEXT, stride=STRIDE)
        vector = sl.SteeringVector.from_tensor(torch.ones(128), layer=1)
        steered = sl.perplexity(
            engine, ids, context_length=CONTEXT, stride=STRIDE, plan=sl.Plan(sl.add(vector, coef=2.0))
        )
        with sl.load(twin, device="cpu") as plain:
            moved = sl.divergence(engine, plain, ids[:200], context_length=CONTEXT, stride=STRIDE)
        folder = tmp_path / "distributions"
        kept = sl.perplexity(engine, ids[:200], context_length=CONTEXT, stride=STRIDE, distributions=folder)
        info = engine.info
    assert 0 < moved.mean_kl < 0.05  # what quantisation costs
    assert moved.nll_a == pytest.approx(kept.token_nlls, abs=1e-4)
    assert sum(len(shard.positions) for shard in sl.read_distributions(folder)) == 199
    assert info.weight_processing == "compressed-tensors int-quantized"
    assert found.num_tokens == 399
    # the same weights, and activations rounded as the kernel rounds them
    assert found.nll == pytest.approx(reference_nll(twin, ids, activations=_as_int8), abs=2e-3)
    # the same weights alone: what rounding the activations costs
    assert found.perplexity == pytest.approx(math.exp(reference_nll(twin, ids)), rel=0.03)
    assert abs(steered.nll - found.nll) > 0.01


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels for packed weights need a GPU")
@pytest.mark.parametrize(
    ("build", "processing", "dtype", "activations"),
    [
        (build_w4a16, "compressed-tensors pack-quantized", torch.float16, None),
        (build_gptq, "gptq", torch.float16, None),
        (build_awq, "awq", torch.float16, None),
        (build_fp8, "compressed-tensors float-quantized", torch.bfloat16, _as_fp8),
        (build_nvfp4, "compressed-tensors nvfp4-pack-quantized", torch.bfloat16, None),
        (build_mxfp4, "mxfp4", torch.bfloat16, None),
    ],
)
def test_packed_weights_on_a_gpu(build, processing, dtype, activations, tmp_path):
    quantised, twin = build(tmp_path)
    ids = AutoTokenizer.from_pretrained(twin)(reference_text())["input_ids"][:400]
    name = str(dtype).removeprefix("torch.")
    with started(quantised, layers=[1], dtype=name, gpu_memory_utilization=0.2) as engine:
        vector = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=1)
        options = {"context_length": CONTEXT, "stride": STRIDE}
        found = sl.perplexity(engine, ids, **options)
        steered = sl.perplexity(engine, ids, plan=sl.Plan(sl.add(vector, coef=2.0)), **options)
        info = engine.info
    assert processing in info.weight_processing
    # experts are chosen by rounded numbers: in bfloat16 the twin itself is 7 % from its float32 value
    computed = torch.float32 if processing == "mxfp4" else dtype
    wanted = reference_nll(twin, ids, activations=activations, dtype=computed, device="cuda")
    # FP8: of 400 tokens whose activations are rounded to three bits, in another order
    bound = 0.01 if activations is None and computed == dtype else 0.03
    assert found.perplexity == pytest.approx(math.exp(wanted), rel=bound)
    assert abs(steered.nll - found.nll) > 0.01
