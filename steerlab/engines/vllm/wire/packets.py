"""Bytes between the engine and its workers: a JSON header and arrays. Nothing in them is ever executed."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def pack(header: Any, arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """A header and named arrays as bytes."""
    parts, described = [], []
    for name, array in (arrays or {}).items():
        whole = np.ascontiguousarray(array)
        described.append([name, whole.dtype.str, list(whole.shape)])
        parts.append(whole.tobytes())
    head = json.dumps({"header": header, "arrays": described}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


def unpack(data: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """The header and arrays that `pack` wrote."""
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    arrays = {}
    for name, dtype, shape in head["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, dtype=dtype, count=count, offset=start).reshape(shape).copy()
        start += count * np.dtype(dtype).itemsize
    return head["header"], arrays
