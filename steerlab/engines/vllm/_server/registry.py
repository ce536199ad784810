"""The vectors that a server offers: read once, from folders that its operator named."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError, SteerlabError, VectorFileError
from steerlab.engines.vllm._client.compiled_plan import wired_point
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.steering.files import load_vectors
from steerlab.steering.vectors import SteeringVector

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class VectorRegistry:
    """Vectors by name and by content hash. What a client sends is only ever looked up here, never opened.

    Attributes:
        names: a file's stem, and the vectors in that file.
        hashes: a vector's content hash, and the vector.
    """

    names: Mapping[str, tuple[SteeringVector, ...]]
    hashes: Mapping[str, SteeringVector]

    @classmethod
    def read(cls, folders: Iterable[Path]) -> "VectorRegistry":
        """Every vector file of some folders; files of other suffixes, and folders inside, are left alone.

        Raises:
            InputError: for a folder that is none or holds no vector file, or two files of one name.
            VectorFileError: for a `.safetensors` file that is not a vector file of ours.
        """
        names: dict[str, tuple[SteeringVector, ...]] = {}
        for folder in folders:
            for path in _vector_files(folder):
                if path.stem in names:
                    raise InputError(f"Two vector files are named {path.stem!r}; a name stands for one: rename {path}.")
                names[path.stem] = tuple(load_vectors(path))
        return cls(names, _by_hash(names))

    def find(self, asked: str, layer: int | None) -> SteeringVector:
        """The vector of a name or hash.

        Args:
            asked: what a client sent.
            layer: which of the vectors, where a name stands for several.

        Raises:
            InputError: if there is none, or several.
        """
        if asked in self.hashes:
            found = (self.hashes[asked],)
        elif asked in self.names:
            found = self.names[asked]
        else:
            raise VectorFileError(self._unknown(asked))
        chosen = [vector for vector in found if layer is None or vector.layer == layer]
        if len(chosen) == 1:
            return chosen[0]
        points = ", ".join(f"{vector.hook_point.name} ({vector.hash})" for vector in found)
        if not chosen:
            raise InputError(f"{asked!r} has no vector for layer {layer}; it has {points}.")
        how = "`layer`, or" if layer is None else "by"
        raise InputError(f"{asked!r} stands for several vectors: {points}; choose one with {how} its hash.")

    def listing(self, config: SteeringConfig, info: ModelInfo) -> list[dict[str, Any]]:
        """Every vector, as `GET /steerlab/vectors` shows it."""
        return [
            {
                "name": name,
                "hash": vector.hash,
                "hook_point": vector.hook_point.name,
                "layer": vector.layer,
                "norm": vector.norm,
                "unusable_because": _obstacle(vector, config, info),
                "card": vector.card.to_json(),
            }
            for name, vectors in sorted(self.names.items())
            for vector in vectors
        ]

    def _unknown(self, asked: str) -> str:
        near = difflib.get_close_matches(asked, self.names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(self.names))
        return (
            f"no vector {asked[:80]!r} is registered. Use a registered name or content hash, never by a path; "
            f"the names are {known}.{hint}"
        )


def _vector_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"--vectors takes a folder of vector files; {folder} is none.")
    found = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    if not found:
        raise InputError(f"{folder} holds no vector file ({SUFFIX}); SteeringVector.save writes them.")
    return found


def _by_hash(names: Mapping[str, tuple[SteeringVector, ...]]) -> dict[str, SteeringVector]:
    found: dict[str, SteeringVector] = {}
    for name, vectors in names.items():
        for vector in vectors:
            twin = found.setdefault(vector.hash, vector)
            if twin.card.median_norm != vector.card.median_norm:
                raise InputError(
                    f"{name!r} and another file hold the same vector ({vector.hash}) with different median norms, so a "
                    "dose of it would mean two things; remove one."
                )
    taken = sorted(set(names) & set(found))
    if taken:
        raise InputError(f"A vector file is named {taken[0]!r}, which is the content hash of a vector; rename it.")
    return found


def _obstacle(vector: SteeringVector, config: SteeringConfig, info: ModelInfo) -> str | None:
    """Why no request can use a vector here; None if one can."""
    if vector.d_model != info.d_model:
        return f"it has {vector.d_model} values, the stream of {info.name} has {info.d_model}"
    try:
        vector.unit  # noqa: B018  a zero vector has none
        wired_point(vector.hook_point, config)
    except SteerlabError as error:
        return str(error)
    return None
