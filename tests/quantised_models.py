"""Tiny models with quantised weights, packed by hand in the formats of the libraries, and their dequantised twins.

`python -m tests.quantised_models FOLDER` saves one of each kind with its twin, for a host where they can run.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_families import build_family
from tests.tiny_models import build_tiny_llama

SHAPE = {"hidden_size": 128, "intermediate_size": 256}  # what GPU kernels for packed weights can take
GROUP = 32

# What a packed layer is: its tensors under their suffixes, and the weights that they stand for.
Packed = tuple[dict[str, Tensor], Tensor]


def build_w8a8(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Save a Llama whose linear layers have int8 weights (a scale per output channel) and take int8 activations.

    Returns:
        The quantised model's directory, and that of the float32 model whose weights equal the dequantised ones.
    """
    inputs = _scheme(8, strategy="token", dynamic=True)
    return _build(directory, seed, pack_int8, _compressed("int-quantized", _scheme(8, strategy="channel"), inputs))


def build_w4a16(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Save a Llama whose linear layers have int4 weights, packed in int32 with a scale per group of 32 inputs.

    Returns:
        As `build_w8a8`.
    """
    return _build(directory, seed, pack_int4, _compressed("pack-quantized", _scheme(4, strategy="group")))


def build_fp8(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """As `build_w8a8`, with float8 (e4m3) in place of int8."""
    inputs = _scheme(8, kind="float", strategy="token", dynamic=True)
    weights = _scheme(8, kind="float", strategy="channel")
    return _build(directory, seed, pack_fp8, _compressed("float-quantized", weights, inputs))


def build_nvfp4(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """As `build_w4a16`, with float4 (e2m1) and a float8 scale per group of 16 inputs."""
    weights = _scheme(4, kind="float", strategy="tensor_group", group=16)
    return _build(directory, seed, pack_nvfp4, _compressed("nvfp4-pack-quantized", weights))


def build_gptq(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """As `build_w4a16`, in GPTQ's layout: packed along the inputs, one zero point for all."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    return _build(directory, seed, pack_gptq, config)


def build_awq(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """As `build_w4a16`, in AWQ's layout: packed along the outputs, a zero point per group."""
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return _build(directory, seed, pack_awq, config)


def build_mxfp4(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Save a gpt-oss whose experts have float4 (e2m1) weights with a power of two per group of 32 inputs.

    Returns:
        As `build_w8a8`.
    """
    quantised, twin = (
        build_family(directory / name, "gpt_oss", hidden_size=256, intermediate_size=512)  # what its kernels can take
        for name in ("quantised", "dequantised")
    )
    packed, plain = {}, {}
    for name, values in load_file(twin / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors, plain[name] = pack_mxfp4(values)
            packed |= {f"{name}_{suffix}": tensor for suffix, tensor in tensors.items()}
        else:
            packed[name] = plain[name] = values
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _save(quantised, twin, packed, plain, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return quantised, twin


def pack_int8(weight: Tensor) -> Packed:
    """Symmetric int8 with a scale per row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def pack_int4(weight: Tensor) -> Packed:
    """Symmetric int4 with a float16 scale per row and group; eight codes in one int32, the first in the lowest bits."""
    codes, scale, dequantised = _int4(weight)
    packed = _words(codes.view(len(codes), -1, 8), dim=2)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, dequantised


def _int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to 15 of a weight [rows, columns], float16 scales [rows, groups], and what both stand for."""
    groups = weight.view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(dim=2, keepdim=True) / 7).half()
    codes = (groups / scale.float()).round().clamp(-8, 7)
    return (codes.long() + 8).view(weight.shape), scale[:, :, 0], (codes * scale.float()).view(weight.shape)


def pack_fp8(weight: Tensor) -> Packed:
    """float8 (e4m3) with a scale per row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def pack_nvfp4(weight: Tensor) -> Packed:
    """float4 (e2m1), two codes in one byte, with a float8 scale per row and 16 inputs over a scale that all share."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // 16, 16)
    scale = (groups.abs().amax(dim=2, keepdim=True) / 6 * SHARED_SCALE).to(torch.float8_e4m3fn)
    units = groups / (scale.float() / SHARED_SCALE)
    codes = (units.abs()[..., None] - _E2M1).abs().argmin(dim=-1)
    values = torch.where(units < 0, -_E2M1[codes], _E2M1[codes])
    signed = (codes + 8 * (units < 0)).view(rows, columns // 2, 2).to(torch.uint8)
    tensors = {
        "weight_packed": signed[:, :, 0] | signed[:, :, 1] << 4,
        "weight_scale": scale[:, :, 0],
        "weight_global_scale": torch.tensor([SHARED_SCALE]),
    }
    return tensors, (values * scale.float() / SHARED_SCALE).view(rows, columns)


def pack_gptq(weight: Tensor) -> Packed:
    """Symmetric int4 as GPTQ stores it: transposed, eight inputs in one int32; zero points are written less 1."""
    codes, scale, dequantised = _int4(weight)
    columns, rows = codes.shape
    return {
        "qweight": _words(codes.T.reshape(rows // 8, 8, columns), dim=1),
        "qzeros": _words(torch.full((rows // GROUP, columns // 8, 8), 7), dim=2),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(rows) // GROUP).to(torch.int32),
    }, dequantised


def pack_awq(weight: Tensor) -> Packed:
    """int4 with a zero point per group, as AWQ stores it: transposed, eight outputs in one int32, in its own order."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(dim=2, keepdim=True).clamp_max(0), groups.amax(dim=2, keepdim=True).clamp_min(0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale + zero).round().clamp(0, 15)
    dequantised = ((codes - zero) * scale).view(weight.shape)
    by_input, zeros = codes.view(weight.shape).T.long(), zero[:, :, 0].T.long()
    return {
        "qweight": _words(by_input.reshape(len(by_input), -1, 8)[:, :, _AWQ_ORDER], dim=2),
        "qzeros": _words(zeros.reshape(len(zeros), -1, 8)[:, :, _AWQ_ORDER], dim=2),
        "scales": scale[:, :, 0].T.half().contiguous(),
    }, dequantised


def pack_mxfp4(weight: Tensor) -> Packed:
    """float4 (e2m1) of experts' weights [experts, inputs, outputs], two codes in one byte, with exponents of groups."""
    groups = weight.transpose(1, 2).reshape(*weight.shape[:1], weight.shape[2], -1, 32)
    exponents = (groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30).log2().floor() - 2).clamp(-127, 127)
    units = groups / exponents.exp2()
    codes = (units.abs()[..., None] - _E2M1).abs().argmin(dim=-1)
    values = torch.where(units < 0, -_E2M1[codes], _E2M1[codes])
    signed = (codes + 8 * (units < 0)).to(torch.uint8)
    tensors = {"blocks": signed[..., ::2] | signed[..., 1::2] << 4, "scales": (exponents[..., 0] + 127).to(torch.uint8)}
    return tensors, (values * exponents.exp2()).flatten(2).transpose(1, 2).contiguous()


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
SHARED_SCALE = 1024.0


def _words(digits: Tensor, dim: int) -> Tensor:
    """Eight digits of four bits along a dimension as one int32, the first in the lowest bits."""
    shape = [8 if k == dim else 1 for k in range(digits.dim())]
    words = (digits.long() << (4 * torch.arange(8)).view(shape)).sum(dim=dim)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _scheme(
    bits: int, *, strategy: str, kind: str = "int", dynamic: bool = False, group: int | None = None
) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    if strategy in ("group", "tensor_group"):
        scheme["group_size"] = group or GROUP
    return scheme


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration in the compressed-tensors format."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _build(
    directory: Path,
    seed: int,
    pack: Callable[[Tensor], Packed],
    quantization: dict[str, Any],
) -> tuple[Path, Path]:
    quantised, twin = directory / "quantised", directory / "dequantised"
    for path in (quantised, twin):
        build_tiny_llama(path, seed=seed, context=512, **SHAPE)
    packed, plain = {}, {}
    for name, values in load_file(twin / "model.safetensors").items():
        if name.endswith("proj.weight"):
            tensors, plain[name] = pack(values)
            packed |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in tensors.items()}
        else:
            packed[name] = plain[name] = values
    _save(quantised, twin, packed, plain, quantization)
    return quantised, twin


def _save(
    quantised: Path, twin: Path, packed: dict[str, Tensor], plain: dict[str, Tensor], quantization: dict[str, Any]
) -> None:
    """Writes the weights of both in place of those there, and the configuration of the one."""
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


if __name__ == "__main__":
    for build in (build_w8a8, build_w4a16, build_fp8, build_nvfp4, build_gptq, build_awq, build_mxfp4):
        for saved in build(Path(sys.argv[1]) / build.__name__.removeprefix("build_")):
            sys.stdout.write(f"{saved}\n")
