"""Results on disk: a JSON file, and beside it a safetensors file that the JSON names by its content.

The tensors are written first, under a name made of their hash; the JSON file, replaced in one step, then points to
them. A reader sees the old pair or the new one, and notices a damaged file. Graphs are not kept.
"""

import json
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from steerlab.core._files import write_atomic
from steerlab.core._hashing import bytes_hash
from steerlab.core.errors import DataError

T = TypeVar("T")
_FORMAT = 1


def write_results(path: str | Path, kind: str, data: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Writes a result of a kind: what is not a tensor as JSON, and the tensors by name.

    Raises:
        DataError: for what JSON cannot hold.
    """
    path = _json_path(path)
    payload = save({name: values.detach().cpu().contiguous() for name, values in tensors.items()})
    tensor_file = path.with_name(f"{path.stem}-{bytes_hash(payload)}.safetensors")
    content = {"format": _FORMAT, "kind": kind, "tensors": tensor_file.name, "data": data}
    try:
        text = json.dumps(content, ensure_ascii=False)
    except TypeError as error:
        raise DataError(
            f"{kind} cannot be saved as JSON: {error}. Make prompts and examples of plain values."
        ) from error
    write_atomic(tensor_file, payload)
    write_atomic(path, text + "\n")
    own = re.compile(re.escape(path.stem) + r"-[0-9a-f]{16}\.safetensors")  # another's file is never one of ours
    for stale in path.parent.glob("*.safetensors"):
        if stale != tensor_file and own.fullmatch(stale.name):
            stale.unlink(missing_ok=True)
    return path


def read_results(path: str | Path, kind: str, make: Callable[[dict[str, Any], dict[str, Tensor]], T]) -> T:
    """What `make` makes of the data and tensors that `write_results` wrote.

    Raises:
        DataError: if there is no such file, it holds another kind, or it is damaged.
    """
    path = _json_path(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if (stored["format"], stored["kind"]) != (_FORMAT, kind):
            raise DataError(
                f"{path} holds {stored['kind']!r} in format {stored['format']!r}, not {kind!r} in {_FORMAT}."
            )
        payload = (path.parent / Path(stored["tensors"]).name).read_bytes()
        if f"-{bytes_hash(payload)}." not in stored["tensors"]:
            raise DataError(
                f"{stored['tensors']} beside {path} is damaged: its content does not have the hash in its name."
            )
        return make(stored["data"], load(payload))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Cannot read {kind} from {path}: {type(error).__name__}: {error}.") from error


def _json_path(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".json" else path.with_name(path.name + ".json")


def joined(nested: Sequence[Sequence[Tensor]]) -> Tensor:
    """Nested tensors one after the other, on the CPU."""
    return torch.cat([values.detach().cpu() for row in nested for values in row])


def joined_arrays(nested: Sequence[Sequence[np.ndarray]]) -> Tensor:
    """Nested arrays one after the other."""
    return torch.from_numpy(np.concatenate([values for row in nested for values in row]))


def as_arrays(nested: Sequence[Sequence[Tensor]]) -> list[list[np.ndarray]]:
    """Nested tensors as NumPy arrays."""
    return [[values.numpy() for values in row] for row in nested]


def cut(values: Tensor, lens: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Values cut into `[B][G]` parts of these lengths, copied so that no part keeps the whole alive."""
    flat = [n for row in lens for n in row]
    if sum(flat) != len(values):
        raise ValueError(f"{len(values)} values for {sum(flat)} tokens")
    bounds = list(accumulate(flat, initial=0))
    parts = iter([values[start:stop].clone() for start, stop in pairwise(bounds)])
    return [[next(parts) for _ in row] for row in lens]
