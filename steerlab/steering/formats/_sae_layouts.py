"""How sparse autoencoders lie in their publishers' files: which arrays are which, where they sit, what encodes.

| layout | files | arrays |
| --- | --- | --- |
| SAELens | cfg.json, sae_weights.safetensors | ours |
| Gemma Scope | params.npz | ours |
| Gemma Scope 2 | config.json, params.safetensors | ours, W_enc and W_dec as w_enc and w_dec |
| sparsify | cfg.json, sae.safetensors | encoder.weight `[d_sae, d_in]`, encoder.bias |
| dictionary_learning | config.json, ae.pt | encoder.weight and decoder.weight as torch.nn.Linear has them, or ours |
| Llama Scope | hyperparams.json, checkpoints/final.safetensors | as torch.nn.Linear has them |

Ours are `W_enc` `[d_in, d_sae]`, `W_dec` `[d_sae, d_in]`, `b_enc`, `b_dec`, `threshold`, `b_gate`, `b_mag`, `r_mag`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from steerlab.core.errors import VectorFileError
from steerlab.steering._sae_arrays import NpzArrays, SaeArrays, SafetensorsArrays
from steerlab.steering._sae_named_arrays import NamedArrays, TensorArrays
from steerlab.steering.formats.torch_files import load_tensors
from steerlab.steering.sae import Encoding

_MAX_CONFIG: Final = 1 << 20
_MAX_WEIGHTS: Final = 1 << 36
_LINEAR: Final = {
    "W_enc": ("encoder.weight", True),
    "b_enc": ("encoder.bias", False),
    "W_dec": ("decoder.weight", True),
    "b_dec": ("decoder.bias", False),
}
"""Per array of ours, its name as a torch.nn.Linear has it, and whether it lies the other way round."""
_AS_IN_FILE: Final = "scaled as in the file"


@dataclass(frozen=True)
class Found:
    """An autoencoder as its files have it.

    Attributes:
        arrays: its weights, by our names.
        encoding: its encoder.
        hook_point: where it sits, if that is stated.
        model: of which model it is, likewise.
        notes: what is known of its scale.
        shape: features and width, as far as they are stated.
    """

    arrays: SaeArrays
    encoding: Encoding
    hook_point: str | None = None
    model: str | None = None
    notes: str = _AS_IN_FILE
    shape: tuple[int | None, int | None] = (None, None)


def find_sae(path: Path) -> Found:
    """The autoencoder of a folder, or of an `.npz` file.

    Raises:
        VectorFileError: if no layout fits, or the files are damaged or contradict themselves.
    """
    if path.suffix == ".npz":
        return _gemma_scope(path)
    for files, read in _LAYOUTS.items():
        if all((path / name).is_file() for name in files):
            return read(path)
    if (path / "cfg.json").is_file():  # its weights are missed by name
        return _saelens(path)
    layouts = "; ".join(" and ".join(files) for files in _LAYOUTS)
    raise VectorFileError(f"{path} is no autoencoder's folder: it holds none of: {layouts}. Those are read.")


# --- Gemma Scope ------------------------------------------------------------------------------------------------------


def _gemma_scope(path: Path) -> Found:
    arrays = NpzArrays(path)
    lower = {ours: (ours.lower(), False) for ours in ("W_enc", "W_dec") if ours.lower() in arrays.names()}
    return Found(NamedArrays(arrays, lower), Encoding("jumprelu", subtracts=False))


def _gemma_scope_2(path: Path) -> Found:
    config = _config(path / "config.json")
    reads, writes = config.get("hf_hook_point_in"), config.get("hf_hook_point_out")
    obstacle = None
    if config.get("architecture") != "jump_relu":
        obstacle = f"its encoder is a {config.get('architecture')!r:.40}, and jump_relu is what is known of Gemma Scope"
    elif writes not in (None, reads):
        obstacle = _elsewhere(reads, writes)
    elif config.get("affine_connection"):
        obstacle = "it has an affine connection beside its features"
    names = {"W_enc": ("w_enc", False), "W_dec": ("w_dec", False)}
    arrays = NamedArrays(SafetensorsArrays(path / "params.safetensors"), names)
    encoding = Encoding("jumprelu", subtracts=False, obstacle=obstacle)
    return Found(arrays, encoding, _of_module(writes or reads), _text(config, "model_name"))


# --- sparsify, dictionary_learning, Llama Scope -----------------------------------------------------------------------


def _sparsify(path: Path) -> Found:
    config = _config(path / "cfg.json")
    k = config.get("k")
    unknown = [name for name in ("signed", "skip_connection", "transcode") if config.get(name)]
    obstacle = None
    if config.get("activation", "topk") != "topk":
        obstacle = f"its activation is {config['activation']!r:.40}, and topk is what is known of sparsify"
    elif unknown:
        obstacle = f"its configuration states {unknown[0]}, which changes what features are"
    elif not isinstance(k, int):
        obstacle = "its configuration states no k"
    names = {ours: _LINEAR[ours] for ours in ("W_enc", "b_enc")}
    arrays = NamedArrays(SafetensorsArrays(path / "sae.safetensors"), names)
    stated = (config.get("num_latents") or None, config.get("d_in"))
    return Found(arrays, Encoding("topk", k=k, obstacle=obstacle), _of_module(path.name), shape=_widths(path, *stated))


_GATED: Final = {"b_dec": "decoder_bias", "b_gate": "gate_bias", "b_mag": "mag_bias"}
_WEIGHTS: Final = {ours: _LINEAR[ours] for ours in ("W_enc", "W_dec")}
_CLASSES: Final[Mapping[str, tuple[str, bool, Mapping[str, tuple[str, bool]]]]] = {
    "AutoEncoder": ("relu", True, {**_LINEAR, "b_dec": ("bias", False)}),
    "AutoEncoderNew": ("relu", False, _LINEAR),
    "GatedAutoEncoder": ("gated", True, {**_WEIGHTS, **{ours: (name, False) for ours, name in _GATED.items()}}),
    "AutoEncoderTopK": ("topk", True, {**_WEIGHTS, "b_enc": _LINEAR["b_enc"]}),
    "BatchTopKSAE": ("jumprelu", True, {**_WEIGHTS, "b_enc": _LINEAR["b_enc"]}),
    "MatryoshkaBatchTopKSAE": ("jumprelu", True, {}),
    "JumpReluAutoEncoder": ("jumprelu", False, {}),
}
"""Per class of dictionary_learning: the encoder, whether b_dec is subtracted first, and the names of arrays."""
_SUBMODULE: Final = re.compile(r"(resid_post|resid_mid|resid_pre)(?:_layer_\d+)?")


def _dictionary_learning(path: Path) -> Found:
    config = _config(path / "config.json")
    trainer = config.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    name = trainer.get("dict_class")
    if name not in _CLASSES:
        raise VectorFileError(
            f"{path / 'config.json'} states dict_class {name!r:.60}; of dictionary_learning these are read: "
            f"{', '.join(_CLASSES)}."
        )
    kind, subtracts, names = _CLASSES[name]
    tensors = {str(key): value for key, value in load_tensors(path / "ae.pt", most=_MAX_WEIGHTS).items()}
    size = trainer.get("dict_size")
    if kind == "jumprelu" and tensors.get("threshold", torch.zeros(1)).ndim == 0 and isinstance(size, int):
        tensors["threshold"] = tensors["threshold"].expand(size)  # one for all features
    k = trainer.get("k") if kind == "topk" else None
    obstacle = "its configuration states no k" if kind == "topk" and not isinstance(k, int) else None
    arrays = NamedArrays(TensorArrays(path / "ae.pt", tensors), names)
    encoding = Encoding(kind, subtracts=subtracts, k=k, obstacle=obstacle)
    module = _SUBMODULE.fullmatch(str(trainer.get("submodule_name")))
    layer = trainer.get("layer")
    point = f"blocks.{layer}.hook_{module[1]}" if module is not None and isinstance(layer, int) else None
    stated = _widths(path, size, trainer.get("activation_dim"))
    return Found(arrays, encoding, point, _text(trainer, "lm_name"), shape=stated)


def _llama_scope(path: Path) -> Found:
    config = _config(path / "hyperparams.json")
    reads, writes = _text(config, "hook_point_in"), _text(config, "hook_point_out")
    normalised = config.get("norm_activation", "dataset-wise")
    obstacle = (
        f"it reads a stream normalised by {normalised!r:.40}, and its threshold counts the decoders' norms in"
        if writes in (None, reads)
        else _elsewhere(reads, writes)
    )
    arrays = NamedArrays(SafetensorsArrays(path / "checkpoints" / "final.safetensors"), _LINEAR)
    shape = _widths(path, config.get("d_sae"), config.get("d_model"))
    notes = f"in a space normalised by {normalised!r:.60}"
    return Found(arrays, Encoding("jumprelu", obstacle=obstacle), writes or reads, None, notes, shape)


# --- SAELens ----------------------------------------------------------------------------------------------------------

_STATED: Final = {
    "standard": "relu",
    "relu": "relu",
    "jumprelu": "jumprelu",
    "gated": "gated",
    "topk": "topk",
}
"""What configurations call architectures and activations, and what they are here."""


def _saelens(path: Path) -> Found:
    place = path / "cfg.json"
    config = _config(place)
    metadata = config.get("metadata")
    stated = config | (metadata if isinstance(metadata, dict) else {})
    stated.setdefault("hook_name", stated.get("hook_point"))  # what it was called before
    if isinstance(stated.get("normalize_activations"), bool):  # what older versions wrote
        stated["normalize_activations"] = "expected_average_only_in" if stated["normalize_activations"] else "none"
    hook, model = stated.get("hook_name_out") or stated.get("hook_name"), stated.get("model_name")
    if not all(entry is None or isinstance(entry, str) for entry in (hook, model)):
        raise VectorFileError(f"{place} states a hook point or a model that is no text.")
    normalised = stated.get("normalize_activations", "none")
    notes = _AS_IN_FILE if normalised in ("none", None) else f"in a space normalised by {normalised!r:.60}"
    shape = _widths(place, stated.get("d_sae"), stated.get("d_out") or stated.get("d_in"))
    arrays = SafetensorsArrays(path / "sae_weights.safetensors")
    encoding = _saelens_encoding(stated, arrays)
    if encoding.by_norm:
        notes += "; an activation of 1 writes the row divided by its norm"
    return Found(arrays, encoding, hook, model, notes, shape)


def _saelens_encoding(stated: dict[str, Any], arrays: SaeArrays) -> Encoding:
    """The encoder that a configuration states, with what keeps its features from being computed here."""
    architecture, activation = stated.get("architecture", "standard"), stated.get("activation_fn_str", "relu")
    if activation == "relu" and stated.get("activation_fn") is not None:
        activation = stated["activation_fn"]
    named = architecture if architecture != "standard" else activation
    kind = _STATED.get(str(named), "")
    subtracts = stated.get("apply_b_dec_to_input")
    options = stated.get("activation_fn_kwargs")
    k = stated.get("k", options.get("k") if isinstance(options, dict) else None)
    normalised = stated.get("normalize_activations", "none")
    reads, writes = stated.get("hook_name"), stated.get("hook_name_out")
    if not kind:
        obstacle = f"its encoder is a {named!r:.40}, and relu, jumprelu, gated and topk are known"
    elif normalised not in ("none", None):
        obstacle = f"it reads a stream normalised by {normalised!r:.40}, and what that divides by is not in its files"
    elif writes not in (None, reads):
        obstacle = _elsewhere(reads, writes)
    elif stated.get("reshape_activations") not in ("none", None):
        obstacle = f"it reads the outputs of heads side by side ({stated['reshape_activations']!r:.40})"
    elif kind == "topk" and not isinstance(k, int):
        obstacle = "its configuration states no k"
    elif subtracts not in (None, True, False):
        obstacle = f"it states apply_b_dec_to_input={subtracts!r:.40}"
    elif _is_scaled(arrays):
        obstacle = "its features are multiplied by a scaling_factor after they are encoded"
    else:
        obstacle = None
    by_norm = kind == "topk" and bool(stated.get("rescale_acts_by_decoder_norm"))
    return Encoding(kind, subtracts is not False, k if kind == "topk" else None, by_norm, obstacle)


def _is_scaled(arrays: SaeArrays) -> bool:
    if not arrays.path.is_file() or "scaling_factor" not in arrays.names():
        return False
    return not bool((arrays.vector("scaling_factor") == 1).all())  # older versions wrote ones


# --- shared -----------------------------------------------------------------------------------------------------------

_MODULE: Final = re.compile(r"(?:.*\.)?(?:layers|h)\.(\d+)(?:\.output)?")


def _of_module(name: Any) -> str | None:
    """The hook point of a layer's output, by the module's name, such as `layers.10` and `model.layers.10.output`."""
    match = _MODULE.fullmatch(name) if isinstance(name, str) else None
    return None if match is None else f"blocks.{match[1]}.hook_resid_post"


def _elsewhere(reads: Any, writes: Any) -> str:
    return f"it reads at {reads!r:.60} and writes at {writes!r:.60}, and an edit reads where it writes"


def _widths(path: Path, *widths: Any) -> tuple[int | None, int | None]:
    if not all(width is None or isinstance(width, int) for width in widths):
        raise VectorFileError(f"{path} states a width that is no whole number.")
    features, width = widths
    return features, width


def _text(config: Mapping[str, Any], key: str) -> str | None:
    found = config.get(key)
    if found is not None and not isinstance(found, str):
        raise VectorFileError(f"An autoencoder's configuration states {key}={found!r:.60}, which is no text.")
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG:
            raise VectorFileError(f"{path} is far larger than a configuration is.")
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, VectorFileError):
            raise
        raise VectorFileError(f"Cannot read the autoencoder's configuration {path}: {error!s:.120}.") from error
    if not isinstance(config, dict):
        raise VectorFileError(f"{path} is no configuration: it holds a {type(config).__name__}.")
    return config


_LAYOUTS: Final[Mapping[tuple[str, ...], Callable[[Path], Found]]] = {
    ("cfg.json", "sae_weights.safetensors"): _saelens,
    ("cfg.json", "sae.safetensors"): _sparsify,
    ("config.json", "params.safetensors"): _gemma_scope_2,
    ("config.json", "ae.pt"): _dictionary_learning,
    ("hyperparams.json", "checkpoints/final.safetensors"): _llama_scope,
    ("params.npz",): lambda path: _gemma_scope(path / "params.npz"),
}
"""Per layout the files that a folder of it has."""
