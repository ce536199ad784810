"""One door to all backends."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from steerlab.core.errors import InputError

if TYPE_CHECKING:
    import torch

    from steerlab.engines.lens import LensEngine
    from steerlab.engines.remote import RemoteEngine
    from steerlab.engines.vllm import VLLMEngine

Layers = str | int | range | list[int] | tuple[int, ...]
BACKENDS = ("lens", "vllm")
_OF_LENS = {
    "device": "vLLM chooses the device",
    "n_devices": "give tensor_parallel_size=",
    "device_map": "give tensor_parallel_size= or pipeline_parallel_size=",
    "tokenizer": "vLLM reads the model's own",
    "batch_tokens": "give max_num_batched_tokens=",
}


@overload
def load(
    model: "str | Path | Any",
    dtype: "str | torch.dtype | None" = None,
    device: "str | torch.device | None" = None,
    n_devices: int | None = None,
    device_map: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
    batch_tokens: int | None = None,
    *,
    backend: Literal["lens"] = "lens",
) -> "LensEngine": ...
@overload
def load(
    model: str | Path,
    dtype: "str | torch.dtype | None" = None,
    *,
    backend: Literal["vllm"],
    layers: Layers,
    revision: str | None = None,
    **vllm_options: Any,
) -> "VLLMEngine": ...
@overload
def load(model: str, *, api_key: str | None = None, patience: float = 600.0) -> "RemoteEngine": ...
def load(  # the backends explain arguments that they do not have
    model: "str | Path | Any",
    dtype: "str | torch.dtype | None" = None,
    device: "str | torch.device | None" = None,
    n_devices: int | None = None,
    device_map: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
    batch_tokens: int | None = None,
    *,
    backend: str = "lens",
    layers: Layers | None = None,
    **vllm_options: Any,
) -> "LensEngine | VLLMEngine | RemoteEngine":
    """A model, ready to generate, score and capture: on TransformerLens, inside vLLM, or on a server.

    Args:
        model: an alias (`smollm2-135m`), a model directory, a GGUF file (dequantised into the cache, once) or a hub
            id; on TransformerLens also what is in memory: a causal language model of Hugging Face or a
            `SequenceProcessor`, whose weights are shared, or a TransformerBridge, which is used as it is. The address
            of a `steerlab serve`, http://…, gives a `RemoteEngine`, which takes `api_key` and `patience`.
        dtype: of weights and activations: `float32`, `bfloat16`, `float16` or `float64`. By default `float32` on
            TransformerLens; on vLLM the weights' own, but half precision for float32 weights.
        device: (lens) where to put the model; by default the first GPU, else the CPU.
        n_devices: (lens) spread the layers over this many GPUs; 1 by default.
        device_map: (lens) or place them yourself, as in Hugging Face's `from_pretrained`.
        revision: branch, tag or commit, for a hub id.
        tokenizer: (lens) by default the model's own; for a loaded bridge, whose tokenizer TransformerLens has changed,
            it is read again from where it came from.
        batch_tokens: (lens) tokens per forward pass, padding included, 4096 by default; lower it if memory is short.
        backend: `lens` for TransformerLens, `vllm` for vLLM.
        layers: (vllm) the layers that plans edit or that are read: "all", an index or several; `[]` for none.
        **vllm_options: (vllm) further arguments of `VLLMEngine`, and of `vllm.LLM`.

    Raises:
        ModelNotFoundError: if there is no such model; says what to install or do.
        BackendMissingError: for a backend that is not installed.
        InputError: for an unknown dtype or backend, placement stated twice, or an argument of the other backend.

    Examples:
        >>> engine = load("smollm2-135m")  # doctest: +SKIP
        >>> engine = load("smollm2-135m", backend="vllm", layers=[14])  # doctest: +SKIP
        >>> engine = load("http://gpu-machine:8000", api_key="open-sesame")  # doctest: +SKIP
    """
    given = {
        name: value
        for name, value in {
            "dtype": dtype,
            "device": device,
            "n_devices": n_devices,
            "device_map": device_map,
            "revision": revision,
            "tokenizer": tokenizer,
            "batch_tokens": batch_tokens,
        }.items()
        if value is not None
    }
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        return _remote(model, given if layers is None else {**given, "layers": layers}, vllm_options)
    if backend == "lens":
        if layers is not None:
            raise InputError(
                "layers= wires layers of vLLM; on TransformerLens every layer can be edited, so leave it out."
            )
        from steerlab.engines.lens import load as load_lens

        return load_lens(model, **given, **vllm_options)
    if backend != "vllm":
        raise InputError(f"Unknown backend {backend!r}; there are: {', '.join(BACKENDS)}.")
    for name, instead in _OF_LENS.items():
        if name in given:
            raise InputError(f"{name}= belongs to backend='lens'; on vLLM {instead}.")
    if layers is None:
        raise InputError(
            "vLLM wires the layers that can be steered when it starts: pass layers=, e.g. layers=[14], or [] for none."
        )
    from steerlab.engines.vllm import VLLMEngine

    return VLLMEngine(model, layers=layers, **given, **vllm_options)


def _remote(url: str, given: dict[str, Any], options: dict[str, Any]) -> "RemoteEngine":
    """The engine at an address; how its model is loaded was decided when the server started."""
    if given:
        name = next(iter(given))
        raise InputError(f"{name}= belongs to the server at {url}: give it to `steerlab serve`, not to a client.")
    from steerlab.engines.remote import RemoteEngine

    return RemoteEngine(url, **options)
