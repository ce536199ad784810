"""Tiny models with quantised weights, packed by hand in the compressed-tensors format, and their dequantised twins.

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
    weights = _scheme(8, strategy="channel", dynamic=False)
    return _build(directory, seed, pack_int8, "int-quantized", weights, inputs)


def build_w4a16(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Save a Llama whose linear layers have int4 weights, packed in int32 with a scale per group of 32 inputs.

    Returns:
        As `build_w8a8`.
    """
    weights = _scheme(4, strategy="group", dynamic=False) | {"group_size": GROUP}
    return _build(directory, seed, pack_int4, "pack-quantized", weights, None)


def pack_int8(weight: Tensor) -> Packed:
    """Symmetric int8 with a scale per row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def pack_int4(weight: Tensor) -> Packed:
    """Symmetric int4 with a float16 scale per row and group; eight codes in one int32, the first in the lowest bits."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(dim=2, keepdim=True) / 7).half().float()
    codes = (groups / scale).round().clamp(-8, 7)
    dequantised = (codes * scale).view(rows, columns)
    digits = (codes.long() + 8).view(rows, columns // 8, 8)
    words = (digits << (4 * torch.arange(8))).sum(dim=2)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    shape = torch.tensor([rows, columns])
    return {"weight_packed": packed, "weight_scale": scale[:, :, 0].half(), "weight_shape": shape}, dequantised


def _scheme(bits: int, *, strategy: str, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}


def _build(
    directory: Path,
    seed: int,
    pack: Callable[[Tensor], Packed],
    layout: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
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
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantised / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, twin


if __name__ == "__main__":
    for name, build in {"w8a8": build_w8a8, "w4a16": build_w4a16}.items():
        for saved in build(Path(sys.argv[1]) / name):
            sys.stdout.write(f"{saved}\n")
