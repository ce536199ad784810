"""Sparse autoencoders from files: their decoder rows as vectors, and the whole, whose features plans set.

Row i of `W_dec` `[d_sae, d_in]` is what feature i adds to the autoencoder's reconstruction, so adding it to the stream
at the autoencoder's hook point is turning the feature up. Two layouts are read:

* **SAELens**: a folder with `cfg.json` and `sae_weights.safetensors`. The configuration states the hook point and the
  model, at its top or under `metadata`; a transcoder's rows belong where it writes (`hook_name_out`).
* **Gemma Scope**: one `params.npz` with `W_enc`, `b_enc`, `threshold`, `W_dec` and `b_dec`, a JumpReLU autoencoder. It
  states neither hook point nor model: pass them.

Only what is asked for is read, whatever the size of the file. Which activation an encoder has, see
`steerlab.steering.sae`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, overload

from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Integer
from steerlab.core.errors import HookPointError, VectorFileError
from steerlab.steering._sae_arrays import NpzArrays, SaeArrays, SafetensorsArrays
from steerlab.steering.sae import Encoding, SparseAutoencoder
from steerlab.steering.vectors import SteeringVector

_MAX_CONFIG: Final = 1 << 20
_STATED: Final = {
    "standard": "relu",
    "relu": "relu",
    "jumprelu": "jumprelu",
    "gated": "gated",
    "topk": "topk",
}
"""What configurations call architectures and activations, and what they are here."""


@dataclass(frozen=True)
class _Origin:
    """What a layout states about its autoencoder."""

    encoding: Encoding
    hook_point: str | None = None
    model: str | None = None
    notes: str = "scaled as in the file"
    shape: tuple[int | None, int | None] = (None, None)


@overload
def import_sae(
    path: str | Path, features: Sequence[Integer], *, hook_point: str | None = None, model: str | None = None
) -> list[SteeringVector]: ...
@overload
def import_sae(path: str | Path, *, hook_point: str | None = None, model: str | None = None) -> SparseAutoencoder: ...
def import_sae(
    path: str | Path,
    features: Sequence[Integer] | None = None,
    *,
    hook_point: str | None = None,
    model: str | None = None,
) -> Any:
    """A sparse autoencoder at its hook point, or the decoder rows of some of its features.

    Args:
        path: a SAELens folder, or a Gemma Scope `params.npz`.
        features: indices of features, from 0, whose decoder rows are wanted; None for the autoencoder.
        hook_point: where the autoencoder writes; needed if the file does not say it, and then overrules it.
        model: name of its model; likewise.

    Returns:
        The `SparseAutoencoder`; or, with features, what its `vectors(features)` gives: one vector per feature, in the
        requested order, with the row's own length and a card that names feature, file and model.

    Raises:
        VectorFileError: if the files are missing, damaged or contradict each other, there is no such feature, or no
            hook point of ours is stated.

    Examples:
        >>> sae = import_sae("gpt2-res-jb/blocks.8.hook_resid_pre")  # doctest: +SKIP
        >>> plan = sl.Plan(sl.feature(sae, 1234, set_to=8.0))  # doctest: +SKIP
    """
    folder = Path(path)
    arrays: SaeArrays
    if folder.suffix == ".npz":
        arrays = NpzArrays(folder)
        origin = _Origin(Encoding("jumprelu", subtracts=False))
    else:
        origin = _saelens_origin(folder / "cfg.json")
        arrays = SafetensorsArrays(folder / "sae_weights.safetensors")
    origin = replace(origin, hook_point=hook_point or origin.hook_point, model=model or origin.model)
    point = _point(path, origin.hook_point)
    shape = _decoder_shape(arrays, origin.shape)
    made = SparseAutoencoder(folder, point, origin.model, *shape, origin.encoding, origin.notes, arrays)
    return made if features is None else made.vectors(features)


def _point(path: str | Path, name: str | None) -> HookPoint:
    if name is None:
        raise VectorFileError(
            f"{path} does not say where its autoencoder sits; pass hook_point, e.g. 'blocks.20.hook_resid_post'."
        )
    try:
        return HookPoint.parse(name)
    except HookPointError as error:
        raise VectorFileError(f"The autoencoder of {path} sits at {name!r:.80}, no hook point here: {error}") from error


def _decoder_shape(arrays: SaeArrays, stated: tuple[int | None, int | None]) -> tuple[int, int]:
    shape = arrays.shape("W_dec")
    if len(shape) != 2 or min(shape) < 1:
        raise VectorFileError(f"{arrays.path} holds W_dec {list(shape)}; a decoder is [d_sae, d_in].")
    if any(told not in (None, found) for told, found in zip(stated, shape, strict=True)):
        raise VectorFileError(f"{arrays.path} holds W_dec {list(shape)}, its cfg.json states {list(stated)}.")
    return shape[0], shape[1]


# --- SAELens ----------------------------------------------------------------------------------------------------------


def _saelens_origin(path: Path) -> _Origin:
    config = _config(path)
    metadata = config.get("metadata")
    stated = config | (metadata if isinstance(metadata, dict) else {})
    hook, model = stated.get("hook_name_out") or stated.get("hook_name"), stated.get("model_name")
    widths = [stated.get("d_sae"), stated.get("d_out") or stated.get("d_in")]
    if not all(entry is None or isinstance(entry, str) for entry in (hook, model)):
        raise VectorFileError(f"{path} states a hook point or a model that is no text.")
    if not all(width is None or isinstance(width, int) for width in widths):
        raise VectorFileError(f"{path} states a width that is no whole number.")
    normalised = stated.get("normalize_activations", "none")
    notes = _Origin.notes if normalised in ("none", None) else f"in a space normalised by {normalised!r:.60}"
    return _Origin(_encoding(stated), hook, model, notes, (widths[0], widths[1]))


def _encoding(stated: dict[str, Any]) -> Encoding:
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
        obstacle = f"it reads at {reads!r:.60} and writes at {writes!r:.60}, and an edit reads where it writes"
    elif kind == "topk" and (not isinstance(k, int) or stated.get("rescale_acts_by_decoder_norm")):
        obstacle = "its configuration states no plain k, or ranks features by their decoders' norms too"
    elif subtracts not in (None, True, False):
        obstacle = f"it states apply_b_dec_to_input={subtracts!r:.40}"
    else:
        obstacle = None
    return Encoding(kind, subtracts=subtracts is not False, k=k if kind == "topk" else None, obstacle=obstacle)


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
