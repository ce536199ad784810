"""Vector files: safetensors, one tensor per hook point, every card in the metadata.

Layout: each tensor is float32 `[d_model]`, named by its hook point (`blocks.14.hook_resid_post`). The metadata has one
key, `steerlab`, whose value is JSON: `{"format": 1, "cards": {hook point: card}, "hashes": {hook point: hash}}`. A
hash is the vector's content hash, checked when the file is read; files of earlier versions have none. A vector with a
low-rank edit has three more tensors, named by the hook point and `.low_rank.rotation` `[rank, d_model]`,
`.low_rank.weight` `[rank, d_model]` and `.low_rank.bias` `[rank]`; its hash ends in that of the edit. Only such files
have `"format": 2`. Nothing in a file is executed.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from steerlab.core._files import write_atomic
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import HookPointError, VectorFileError, VectorShapeError, VectorValueError
from steerlab.steering.low_rank import LowRank
from steerlab.steering.vectors import SteeringVector, VectorCard, VectorSet

FORMAT = 2
"""The newest format; a file without low-rank edits has format 1, which older versions read too."""
_PARTS = ("rotation", "weight", "bias")
_KEY = "steerlab"
_MAX_BYTES = 1 << 30
_MAX_HEADER = 16 << 20


def save_vectors(path: str | Path, vectors: Sequence[SteeringVector]) -> Path:
    """Writes vectors at distinct hook points to one file, atomically. Equal vectors give equal bytes."""
    names = [vector.hook_point.name for vector in vectors]
    if not names or len(set(names)) < len(names):
        raise VectorFileError(f"A file holds one vector per hook point, at least one; got {names}.")
    cards = {vector.hook_point.name: vector.card.to_json() for vector in vectors}
    tensors = {vector.hook_point.name: vector.values for vector in vectors}
    matrices = {
        f"{vector.hook_point.name}.low_rank.{part}": getattr(vector.low_rank, part)
        for vector in vectors
        if vector.low_rank is not None
        for part in _PARTS
    }
    hashes = {vector.hook_point.name: _checksum(vector) for vector in vectors}
    stated = {"format": FORMAT if matrices else 1, "cards": cards, "hashes": hashes}
    header = json.dumps(stated, sort_keys=True, ensure_ascii=False)
    tensors |= matrices
    return write_atomic(path, save_safetensors(tensors, metadata={_KEY: header}))


def load_vectors(path: str | Path) -> list[SteeringVector]:
    """Reads every vector of a file, in order of layer.

    Raises:
        VectorFileError: if the file is missing, not ours, of a newer format, or damaged, as a checksum tells too.
    """
    data = read_bytes(path)
    cards, hashes = _cards(data, path)
    try:
        tensors = load_safetensors(data)
    except (SafetensorError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise VectorFileError(f"{path} is damaged: {error}.") from error
    edits = _low_rank_edits(path, tensors)
    if set(tensors) != set(cards) or not tensors or not set(edits) <= set(tensors):
        raise VectorFileError(f"{path} is damaged: its tensors and its cards name different hook points.")
    found = [_vector(path, name, tensor, cards[name], edits.get(name)) for name, tensor in tensors.items()]
    for vector in found:
        if hashes.get(vector.hook_point.name, _checksum(vector)) != _checksum(vector):
            raise VectorFileError(
                f"{path} is damaged: its values at {vector.hook_point.name} have another hash than stated."
            )
    return sorted(found, key=lambda vector: vector.hook_point)


def load_one_vector(path: str | Path) -> SteeringVector:
    """Reads a file that holds one vector.

    Raises:
        VectorFileError: as `load_vectors`, or if the file holds several.
    """
    vectors = load_vectors(path)
    if len(vectors) > 1:
        raise VectorFileError(
            f"{path} holds vectors for {len(vectors)} hook points; read it with VectorSet.load and choose a layer."
        )
    return vectors[0]


def load_vector_set(path: str | Path) -> VectorSet:
    """Reads a file that holds vectors of one site.

    Raises:
        VectorFileError: as `load_vectors`, or if the file holds several sites.
    """
    return as_vector_set(path, load_vectors(path))


def checked_size(path: str | Path, most: int = _MAX_BYTES) -> int:
    """The size of a vector file in bytes.

    Raises:
        VectorFileError: if there is no such file, or it is far larger than vectors are.
    """
    try:
        found = Path(path)
        size = found.stat().st_size
    except (OSError, ValueError, TypeError) as error:
        raise VectorFileError(f"Cannot read the vector file {path}: {getattr(error, 'strerror', error)}.") from error
    if found.is_dir():
        raise VectorFileError(f"Cannot read the vector file {path}: it is a folder.")
    if size > most:
        raise VectorFileError(f"{path} is {size:,} bytes; such a file is far smaller. Is it a model?")
    return size


def read_bytes(path: str | Path) -> bytes:
    """The content of a vector file.

    Raises:
        VectorFileError: if it cannot be read, or is far larger than vectors are.
    """
    checked_size(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise VectorFileError(f"Cannot read the vector file {path}: {error.strerror or error}.") from error


def as_vector_set(source: str | Path, vectors: Sequence[SteeringVector]) -> VectorSet:
    """The vectors as a set.

    Raises:
        VectorFileError: if there is none, or they are of several sites or widths, or two are at one layer.
    """
    widths = sorted({vector.d_model for vector in vectors})
    if len(widths) != 1:
        found = f"vectors of the widths {widths}, but a model has one" if widths else "no vector"
        raise VectorFileError(f"{source} holds {found}.")
    try:
        return VectorSet(tuple(vectors))
    except HookPointError as error:
        raise VectorFileError(f"{source} holds no vector set: {error}") from error


def usable_vector(
    path: str | Path, values: torch.Tensor, point: HookPoint, card: VectorCard, low_rank: LowRank | None = None
) -> SteeringVector:
    """The vector, if what a file held is one.

    Raises:
        VectorFileError: if it is not one row of finite numbers.
    """
    try:
        return SteeringVector(values, point, card, low_rank)
    except (VectorShapeError, VectorValueError) as error:
        raise VectorFileError(f"{path} holds a vector that cannot be used: {error}") from error


def check_no_low_rank(vectors: Iterable[SteeringVector], what: str) -> None:
    """Checks that what is written in another format is vectors and no more.

    Raises:
        VectorFileError: for a vector with a low-rank edit, which no other format states.
    """
    held = [vector.hook_point.name for vector in vectors if vector.low_rank is not None]
    if held:
        raise VectorFileError(
            f"{what} states vectors and no low-rank edits, such as the one at {held[0]}; write it with .save, or write "
            "what it adds on average, vector.scaled(1.0), which has no such edit."
        )


def _low_rank_edits(path: str | Path, tensors: dict[str, torch.Tensor]) -> dict[str, LowRank]:
    """The low-rank edits of a file by hook point; their tensors are taken out.

    Raises:
        VectorFileError: if one lacks a part or cannot be used.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name in [name for name in tensors if ".low_rank." in name]:
        point, _, part = name.partition(".low_rank.")
        parts.setdefault(point, {})[part] = tensors.pop(name)
    found = {}
    for point, matrices in parts.items():
        if set(matrices) != set(_PARTS) or any(matrix.dtype != torch.float32 for matrix in matrices.values()):
            raise VectorFileError(
                f"{path} is damaged: the low-rank edit at {point} has {', '.join(sorted(matrices))}; the format states "
                f"{', '.join(_PARTS)} in float32."
            )
        try:
            found[point] = LowRank(**matrices)
        except (VectorShapeError, VectorValueError) as error:
            raise VectorFileError(f"{path} holds a low-rank edit that cannot be used: {error}") from error
    return found


def _checksum(vector: SteeringVector) -> str:
    """Content hash of everything in a vector but its card."""
    return vector.hash if vector.low_rank is None else f"{vector.hash}+{vector.low_rank.hash}"


def _cards(data: bytes, path: str | Path) -> tuple[dict[str, dict], dict[str, str]]:
    """The cards in a file's header, and the hashes if there are any; no tensor is read."""
    not_ours = VectorFileError(
        f"{path} is not a steerlab vector file, or it is truncated; write one with SteeringVector.save. "
        "Files of other tools: VectorSet.from_gguf, VectorSet.from_torch; tensors: "
        "SteeringVector.from_tensor(tensor, layer=…)."
    )
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER):
        raise not_ours
    try:
        header = json.loads(data[8 : 8 + length])
        stated = json.loads(header["__metadata__"][_KEY])
        version, cards, hashes = stated["format"], dict(stated["cards"]), dict(stated.get("hashes", {}))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise not_ours from error
    if version not in (1, FORMAT):
        raise VectorFileError(
            f"{path} has format {version!r}; this version reads formats 1 to {FORMAT}. Update steerlab."
        )
    return cards, hashes


def _vector(path: str | Path, name: str, tensor: torch.Tensor, card: dict, low_rank: LowRank | None) -> SteeringVector:
    if tensor.dtype != torch.float32:
        raise VectorFileError(f"{path} holds {name} as {tensor.dtype}; the format states float32.")
    if tensor.ndim != 1:
        raise VectorFileError(
            f"{path} holds a vector that cannot be used: {name} has shape {list(tensor.shape)}; the format states "
            "[d_model]."
        )
    try:
        point = HookPoint.parse(name)
        if point.name != name:
            raise HookPointError(f"{name!r} is another name of {point.name!r}; files use that one.")
        stated = VectorCard.from_json(card)
    except (HookPointError, VectorValueError, AttributeError, TypeError) as error:
        raise VectorFileError(f"{path} holds a vector that cannot be used: {error}") from error
    return usable_vector(path, tensor, point, stated, low_rank)
