"""How a model's weights are quantised."""

from typing import Any


def quantisation(config: Any, method: str | None = None) -> str:
    """The method and layout of quantised weights, e.g. `compressed-tensors int-quantized`; `none` for plain ones.

    Args:
        config: the model's configuration, of transformers.
        method: the method, where an engine knows it better than the configuration.

    Examples:
        >>> from types import SimpleNamespace
        >>> quantisation(SimpleNamespace(quantization_config={"quant_method": "gptq", "bits": 4}))
        'gptq 4-bit'
        >>> quantisation(SimpleNamespace())
        'none'
        >>> quantisation(SimpleNamespace(dequantised_from="GGUF Q4_1 × 210, F32 × 61"))
        'dequantised from GGUF Q4_1 × 210, F32 × 61'
    """
    source = getattr(config, "dequantised_from", None)
    if source is not None:
        return f"dequantised from {source}"
    stated = getattr(config, "quantization_config", None) or {}
    known = stated if isinstance(stated, dict) else vars(stated)
    used = method or known.get("quant_method") or ("quantised" if stated else None)
    if used is None:
        return "none"
    layout = known.get("format") or _layout(known)
    return " ".join(str(getattr(part, "value", part)) for part in (used, layout) if part)


def _layout(known: dict[str, Any]) -> str | None:
    """The number format, as configurations of bitsandbytes, GPTQ and AWQ name it."""
    if known.get("load_in_4bit") or known.get("_load_in_4bit"):
        return known.get("bnb_4bit_quant_type")
    if known.get("load_in_8bit") or known.get("_load_in_8bit"):
        return "int8"
    bits = known.get("bits")
    return None if bits is None else f"{bits}-bit"
