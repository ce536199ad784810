"""Parses the bytes of an untrusted GGUF file.

The `gguf` package's reader is made for files one trusts: it builds Python objects for as many array elements as a file
claims to have. Here every length is checked against the bytes that are there before anything is made of it.

Source:
    The GGUF specification (ggml, `docs/gguf.md`), versions 2 and 3, little-endian.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from steerlab.core.errors import VectorFileError

# Value types of metadata: number -> (name, bytes of one value); strings and arrays are of no fixed size.
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Only what a vector may be kept in; quantised types have no place in a vector file.
_TENSOR_KINDS: Final = {0: ("F32", 4), 1: ("F16", 2), 28: ("F64", 8), 30: ("BF16", 2)}
_MAX_ENTRIES = 100_000
_MAX_DIMENSIONS = 4
_MAX_STRING = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in a file.

    Attributes:
        name: its name.
        kind: `F32`, `F16`, `F64` or `BF16`.
        shape: its dimensions, the fastest first.
        start: byte at which its data begins.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int


def parse_gguf(data: bytes, path: str | Path) -> tuple[dict[str, object], list[GgufTensor]]:
    """The metadata (arrays left out) and the tensors of a file, every tensor inside the bytes that are there.

    Raises:
        VectorFileError: if it is no GGUF file, of another version, truncated, or contradicts itself.
    """
    cursor = _Cursor(data, path)
    if data[:4] != b"GGUF":
        raise VectorFileError(f"{path} is not a GGUF file.")
    cursor.at = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise VectorFileError(f"{path} states GGUF version {version}; little-endian versions 2 and 3 are read.")
    n_tensors, n_entries = cursor.number("Q"), cursor.number("Q")
    if max(n_tensors, n_entries) > _MAX_ENTRIES:
        raise cursor.damaged(f"it claims {n_tensors} tensors and {n_entries} entries")
    metadata = _metadata(cursor, int(n_entries))
    headers = [_tensor_header(cursor) for _ in range(int(n_tensors))]
    if len({name for name, *_ in headers}) < len(headers):
        raise cursor.damaged("a tensor stands in it twice")
    return metadata, _place(cursor, headers, metadata.get("general.alignment", 32))


class _Cursor:
    """A position in the bytes that never passes their end."""

    def __init__(self, data: bytes, path: str | Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def damaged(self, what: str) -> VectorFileError:
        return VectorFileError(f"{self.path} is damaged: {what}.")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.damaged(f"{size} bytes are due at byte {self.at}, the file has {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> float:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def whole(self, code: str) -> int:
        return int(self.number(code))

    def string(self) -> str:
        length = self.whole("Q")
        if length > _MAX_STRING:
            raise self.damaged(f"a string claims {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged("a string is not UTF-8") from error


def _metadata(cursor: _Cursor, n_entries: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(n_entries):
        key, kind = cursor.string(), cursor.whole("I")
        if key in found:
            raise cursor.damaged(f"the entry {key!r:.60} stands in it twice")
        found[key] = _skip_array(cursor) if kind == _ARRAY else _value(cursor, kind)
    return found


def _value(cursor: _Cursor, kind: int) -> object:
    if kind == _STRING:
        return cursor.string()
    if kind not in _SCALARS:
        raise cursor.damaged(f"an entry has the unknown type {kind}")
    return cursor.number(_SCALARS[kind])


def _skip_array(cursor: _Cursor) -> None:
    """Passes over an array; no entry that is used here is one."""
    kind, length = cursor.whole("I"), cursor.whole("Q")
    if kind in _SCALARS:
        cursor.take(length * struct.calcsize("<" + _SCALARS[kind]))
    elif kind == _STRING and length <= _MAX_ENTRIES * 10:
        for _ in range(length):
            cursor.take(cursor.whole("Q"))
    else:
        raise cursor.damaged(f"an array has {length} values of type {kind}")


def _tensor_header(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, kind, shape, bytes, and offset from the start of all data."""
    name, n_dimensions = cursor.string(), cursor.whole("I")
    if n_dimensions > _MAX_DIMENSIONS:
        raise cursor.damaged(f"the tensor {name!r:.60} has {n_dimensions} dimensions")
    shape = tuple(cursor.whole("Q") for _ in range(n_dimensions))
    kind, offset = cursor.whole("I"), cursor.whole("Q")
    if kind not in _TENSOR_KINDS:
        raise VectorFileError(f"{cursor.path} holds {name!r:.60} in ggml type {kind}; vectors are kept as float32.")
    label, width = _TENSOR_KINDS[kind]
    return name, label, shape, prod(shape) * width, offset


def _place(cursor: _Cursor, headers: list[tuple[str, str, tuple[int, ...], int, int]], alignment: object) -> list:
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"its alignment is {alignment!r:.60}")
    start = cursor.at + -cursor.at % alignment
    placed = []
    for name, kind, shape, size, offset in headers:
        if start + offset + size > len(cursor.data):
            raise cursor.damaged(f"the tensor {name!r:.60} ends past the end of the file")
        placed.append(GgufTensor(name, kind, shape, start + offset))
    return placed
