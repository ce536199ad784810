"""Decoder rows of sparse autoencoders as steering vectors.

Row i of `W_dec` `[d_sae, d_in]` is what feature i adds to the autoencoder's reconstruction, so adding it to the stream
at the autoencoder's hook point is turning the feature up. Two layouts are read:

* **SAELens**: a folder with `cfg.json` and `sae_weights.safetensors`. The configuration states the hook point and the
  model, at its top or under `metadata`; a transcoder's rows belong where it writes (`hook_name_out`).
* **Gemma Scope**: one `params.npz` with the array `W_dec`. It states neither hook point nor model: pass them.

Only the requested rows are read, whatever the size of the file.
"""

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steerlab.core.errors import HookPointError, InputError, VectorFileError
from steerlab.core.hook_points import HookPoint
from steerlab.core.numbers import as_integer, as_list
from steerlab.steering.files import usable_vector
from steerlab.steering.vectors import SteeringVector, VectorCard

_MAX_CONFIG: Final = 1 << 20


@dataclass(frozen=True)
class _Origin:
    """What a layout states about its autoencoder."""

    hook_point: str | None = None
    model: str | None = None
    notes: str = "scaled as in the file"
    shape: tuple[int | None, int | None] = (None, None)


def import_sae(
    path: str | Path, features: Sequence[int], *, hook_point: str | None = None, model: str | None = None
) -> list[SteeringVector]:
    """The decoder rows of some features, at the autoencoder's hook point, in the requested order.

    Args:
        path: a SAELens folder, or a Gemma Scope `params.npz`.
        features: indices of the features, from 0.
        hook_point: where the autoencoder writes; needed if the file does not say it, and then overrules it.
        model: name of its model; likewise.

    Returns:
        One vector per feature, with the row's own length, and a card that names feature, file and model.

    Raises:
        VectorFileError: if the files are missing, damaged or contradict each other, there is no such feature, or no
            hook point of ours is stated.
    """
    wanted = _checked_features(features)
    folder = Path(path)
    if folder.suffix == ".npz":
        origin, rows = _Origin(), _npz_rows(folder, wanted)
    else:
        origin = _saelens_origin(folder / "cfg.json")
        rows = _saelens_rows(folder / "sae_weights.safetensors", wanted, origin.shape)
    origin = replace(origin, hook_point=hook_point or origin.hook_point, model=model or origin.model)
    point = _point(path, origin.hook_point)
    card = VectorCard(method="sae_decoder_row", model=origin.model, extracted_at=point.name)
    return [
        usable_vector(path, row, point, replace(card, name=f"feature {i}", notes=f"{folder.name}: {origin.notes}"))
        for i, row in zip(wanted, rows, strict=True)
    ]


def _checked_features(features: Sequence[int]) -> list[int]:
    found = [as_integer(i) for i in as_list(features) or []]
    if not found or any(i is None or i < 0 for i in found):
        raise InputError(f"features is a list of indices from 0, at least one; got {features!r:.60}.")
    return [i for i in found if i is not None]


def _point(path: str | Path, name: str | None) -> HookPoint:
    if name is None:
        raise VectorFileError(
            f"{path} does not say where its autoencoder sits; pass hook_point, e.g. 'blocks.20.hook_resid_post'."
        )
    try:
        return HookPoint.parse(name)
    except HookPointError as error:
        raise VectorFileError(f"The autoencoder of {path} sits at {name!r:.80}, no hook point here: {error}") from error


# --- SAELens ----------------------------------------------------------------------------------------------------------


def _saelens_origin(path: Path) -> _Origin:
    config = _config(path)
    metadata = config.get("metadata")
    stated = config | (metadata if isinstance(metadata, dict) else {})
    hook, model = stated.get("hook_name_out") or stated.get("hook_name"), stated.get("model_name")
    normalised = stated.get("normalize_activations", "none")
    widths = [stated.get("d_sae"), stated.get("d_out") or stated.get("d_in")]
    if not all(entry is None or isinstance(entry, str) for entry in (hook, model)):
        raise VectorFileError(f"{path} states a hook point or a model that is no text.")
    if not all(width is None or isinstance(width, int) for width in widths):
        raise VectorFileError(f"{path} states a width that is no whole number.")
    notes = _Origin.notes if normalised in ("none", None) else f"in a space normalised by {normalised!r:.60}"
    return _Origin(hook, model, notes, (widths[0], widths[1]))


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


def _saelens_rows(path: Path, wanted: list[int], stated: tuple[int | None, int | None]) -> list[Tensor]:
    try:
        with safe_open(path, "pt") as file:
            decoder = file.get_slice("W_dec")
            shape = decoder.get_shape()
            _check_decoder(path, shape, wanted, stated)
            rows = [decoder[i] for i in wanted]
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, VectorFileError):
            raise
        raise VectorFileError(f"Cannot read the autoencoder's weights {path}: {error!s:.120}.") from error
    if not all(row.is_floating_point() for row in rows):
        raise VectorFileError(f"{path} holds W_dec as {rows[0].dtype}; decoder rows are floating-point.")
    return rows


def _check_decoder(
    path: Path, shape: Sequence[int], wanted: list[int], stated: tuple[int | None, int | None] = (None, None)
) -> None:
    if len(shape) != 2 or min(shape) < 1:
        raise VectorFileError(f"{path} holds W_dec {list(shape)}; a decoder is [d_sae, d_in].")
    if any(told not in (None, found) for told, found in zip(stated, shape, strict=True)):
        raise VectorFileError(f"{path} holds W_dec {list(shape)}, its cfg.json states {list(stated)}.")
    if max(wanted) >= shape[0]:
        raise VectorFileError(f"{path} has {shape[0]} features, numbered from 0; there is no feature {max(wanted)}.")


# --- Gemma Scope ------------------------------------------------------------------------------------------------------


def _npz_rows(path: Path, wanted: list[int]) -> list[Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo("W_dec.npy")
            with archive.open(member) as stream:
                return _npy_rows(path, stream, member.file_size, wanted)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, VectorFileError):
            raise
        raise VectorFileError(
            f"{path} is no archive with the array W_dec, or it is damaged: {error!s:.120}."
        ) from error


def _npy_rows(path: Path, stream: zipfile.ZipExtFile | IO[bytes], size: int, wanted: list[int]) -> list[Tensor]:
    """Rows of an array, found by their place: `np.load` would make the whole array that a header claims."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise VectorFileError(f"{path} holds W_dec in version {version} of the npy format; versions 1 and 2 are read.")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_column, dtype = read_header(stream)
    if dtype.kind != "f" or by_column:
        order = "column by column" if by_column else "row by row"
        raise VectorFileError(f"{path} holds W_dec as {dtype}, {order}; floating-point numbers row by row are read.")
    _check_decoder(path, shape, wanted)
    start = stream.tell()
    if size - start != prod(shape) * dtype.itemsize:
        raise VectorFileError(f"{path} is damaged: W_dec {list(shape)} does not fill its {size:,} bytes.")
    width = shape[1] * dtype.itemsize
    rows = {}
    for i in sorted(set(wanted)):  # forwards only: the stream may be compressed
        stream.seek(start + i * width)
        row = np.frombuffer(stream.read(width), dtype=dtype, count=shape[1])
        rows[i] = torch.from_numpy(row.astype(np.float32))
    return [rows[i] for i in wanted]
