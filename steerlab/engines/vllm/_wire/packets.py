"""Bytes between the engine and its workers: a JSON header and arrays. Nothing in them is ever executed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Answer: TypeAlias = tuple[Any, dict[str, np.ndarray]]
"""A header and named arrays."""


def pack(header: Any, arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    parts, described = [], []
    for name, array in (arrays or {}).items():
        whole = np.ascontiguousarray(array)
        described.append([name, whole.dtype.str, list(whole.shape)])
        parts.append(whole.tobytes())
    head = json.dumps({"header": header, "arrays": described}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


def unpack(data: bytes) -> Answer:
    """The header and arrays that `pack` wrote."""
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    arrays = {}
    for name, dtype, shape in head["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, dtype=dtype, count=count, offset=start).reshape(shape).copy()
        start += count * np.dtype(dtype).itemsize
    return head["header"], arrays


METHOD = "steerlab"
"""The method that the plugin adds to vLLM's workers."""


def command(name: str, header: Any = None, arrays: Mapping[str, np.ndarray] | None = None) -> tuple[str, bytes]:
    """The arguments of `METHOD` for a command."""
    return name, pack(header, arrays)


def unpack_answers(answers: Sequence[bytes]) -> list[Answer]:
    """What every worker answered, in order of rank."""
    return [unpack(answer) if answer else (None, {}) for answer in answers]
