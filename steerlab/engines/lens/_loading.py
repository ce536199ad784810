"""Loading a model as a LensEngine."""

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from steerlab._runtime.self_comparison import is_out_of_memory
from steerlab._runtime.sharding import is_distributed, is_sharded
from steerlab._runtime.shared_weights import HoldsModel
from steerlab.core._arguments import explains_arguments
from steerlab.core._numbers import check_integer, shown
from steerlab.core.errors import InputError, ModelNotFoundError
from steerlab.engines.lens._placement import balanced_device_map
from steerlab.engines.lens._unhooked_model import shallow_copy
from steerlab.engines.lens.engine import LensEngine
from steerlab.models import resolve

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@explains_arguments
def load(
    model: "str | Path | Any",
    dtype: "str | torch.dtype" = "float32",
    device: "str | torch.device | None" = None,
    n_devices: int = 1,
    device_map: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
    batch_tokens: int = 4096,
) -> LensEngine:
    """A model on TransformerLens, ready to generate, score and capture.

    Args:
        model: an alias (`smollm2-135m`), a model directory, a hub id, or a model in memory, whose weights are shared
            and not copied: a loaded TransformerBridge, which is used as it is; a Hugging Face causal language model; a
            `SequenceProcessor`; or another engine. The Hugging Face model's own modules stay as they are. Dtype and
            placement are those it has.
        dtype: of weights and activations: `float32`, `bfloat16`, `float16` or `float64`.
        device: where to put the model; by default the first GPU, else the CPU.
        n_devices: spread the layers over this many GPUs, with about the same bytes on each.
        device_map: or place them yourself, as in Hugging Face's `from_pretrained`.
        revision: branch, tag or commit, for a hub id.
        tokenizer: by default the model's own; for a Hugging Face model in memory, it is read from where the model came
            from; for a loaded bridge, whose tokenizer TransformerLens has changed, it is
            read again from where it came from.
        batch_tokens: tokens per forward pass, padding included; lower it if memory is short.

    Raises:
        ModelNotFoundError: if there is no such model; says what to install or do.
        InputError: for an unknown dtype, or placement stated twice.

    Examples:
        >>> engine = load("smollm2-135m")  # doctest: +SKIP
    """
    if isinstance(model, HoldsModel):
        return _share(model.plain_model(), tokenizer or model.tokenizer, batch_tokens)
    if hasattr(model, "get_output_embeddings") and not hasattr(model, "original_model"):
        return _share(model, tokenizer, batch_tokens)
    if not isinstance(model, str | Path):
        if not hasattr(model, "original_model"):
            raise InputError(
                "load takes a model's name or directory, a Hugging Face causal language model, a SequenceProcessor, an "
                f"engine or a TransformerBridge, got {shown(model)}."
            )
        return LensEngine(model, tokenizer or _tokenizer_of(model), batch_tokens=batch_tokens)
    n_devices = _check_placement(device, n_devices, device_map)
    found = resolve(model, revision=revision)
    from transformer_lens.model_bridge import TransformerBridge

    logging.getLogger("transformer_lens").setLevel(logging.ERROR)
    wanted = _dtype(dtype)
    try:
        if n_devices > 1:
            device_map = balanced_device_map(found.path, n_devices, wanted)
        placement: dict[str, Any] = {"device": _device(device)} if device_map is None else {"device_map": device_map}
        with _no_bar_left_behind():
            bridge = TransformerBridge.boot_transformers(str(found.path), dtype=wanted, **placement)
        own_tokenizer = tokenizer or _read_tokenizer(str(found.path))
    except Exception as error:  # whatever the libraries raise over damaged or unsupported files
        if is_out_of_memory(error):
            raise
        raise ModelNotFoundError(
            f"The model in {found.path} cannot be loaded: {type(error).__name__}: {error}. Check that its files are "
            "whole and that TransformerLens supports its family."
        ) from error
    bridge.eval()
    return LensEngine(
        bridge,
        own_tokenizer,
        name=found.name,
        path=found.path,
        revision=found.revision,
        batch_tokens=batch_tokens,
    )


@contextmanager
def _no_bar_left_behind() -> Iterator[None]:
    """Turns off transformers' bar over the weights where it would stay: anywhere but on a terminal."""
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def _share(model: Any, tokenizer: Any, batch_tokens: int) -> LensEngine:
    """An engine on the weights of a Hugging Face model in memory.

    TransformerLens puts wrappers into the model that it is given, and a BOS into the tokenizer: both get copies, of
    modules that hold the same parameters.
    """
    from transformer_lens.model_bridge import TransformerBridge

    logging.getLogger("transformer_lens").setLevel(logging.ERROR)
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    if is_sharded(model) or any(map(is_distributed, model.parameters())):
        raise InputError(
            f"The parameters of {name} are spread over processes (fully_shard, tensor parallelism), which the engine "
            "cannot run. Load a whole copy; a SequenceProcessor scores the model as it is."
        )
    tokenizer = tokenizer or _tokenizer_from(name)
    try:
        bridge = TransformerBridge.boot_transformers(
            name, hf_model=shallow_copy(model), tokenizer=copy.deepcopy(tokenizer), dtype=model.dtype
        )
    except Exception as error:  # whatever the library raises over a family that it does not know
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{type(model).__name__} cannot run on TransformerLens: {type(error).__name__}: {error}. Check that "
            "TransformerLens supports its family."
        ) from error
    bridge.eval()
    engine = LensEngine(bridge, tokenizer, name=name, batch_tokens=batch_tokens)
    engine._given = model
    return engine


def _tokenizer_from(source: str) -> Any:
    try:
        return _read_tokenizer(source)
    except (OSError, ValueError) as error:
        raise InputError(f"The model's tokenizer cannot be read from {source!r}; pass tokenizer=.") from error


def _read_tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def _tokenizer_of(bridge: Any) -> Any:
    """A loaded bridge's tokenizer, as it was before TransformerLens changed it."""
    changed = getattr(bridge, "tokenizer", None)
    source = getattr(changed, "name_or_path", "")
    if changed is None or not source:
        raise InputError("The bridge has no tokenizer that can be read again; pass tokenizer=.")
    try:
        return _read_tokenizer(source)
    except OSError as error:
        raise InputError(f"The bridge's tokenizer cannot be read again from {source!r}; pass tokenizer=.") from error


def _dtype(dtype: "str | torch.dtype") -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"Unknown dtype {dtype!r}; use one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _check_placement(device: Any, n_devices: int, device_map: Any) -> int:
    """On how many GPUs this asks to spread the layers."""
    stated = [device is not None, n_devices != 1, device_map is not None]
    if sum(stated) > 1:
        raise InputError("State the placement once: device, n_devices or device_map.")
    if device_map is None:
        _device(device)
    n_devices = check_integer(n_devices, "n_devices", least=1)
    available = torch.cuda.device_count()
    if n_devices > max(1, available):
        raise InputError(f"n_devices={n_devices}, but this machine has {available} GPUs that torch can use.")
    return n_devices


def _device(device: Any) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"Unknown device {device!r}; use 'cpu', 'cuda' or 'cuda:0'.") from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device={device!r}, but torch can use {torch.cuda.device_count()} GPUs here.")
    return str(device)
