"""Messages: a line of JSON, then as many bytes of safetensors as the line says."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from steerlab.core.errors import InputError

CONTENT_TYPE = "application/x-steerlab"
"""Of a body that is made of such messages."""

SIZE = "array_bytes"
"""The key under which a line says how many bytes of arrays follow."""

Arrays = dict[str, np.ndarray]


class CutOffError(InputError):
    """Bytes that end inside a message."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        content: what JSON can say.
        arrays: what it cannot: numbers that may be NaN or infinite, and many of them.
    """

    content: dict[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The message as bytes.

        Raises:
            InputError: for content that is no JSON.
        """
        data = (
            save({name: np.ascontiguousarray(values) for name, values in self.arrays.items()}) if self.arrays else b""
        )
        try:
            line = json.dumps({**self.content, SIZE: len(data)}, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise InputError(f"What a message holds has to be JSON, without NaN and infinity: {error}.") from error
        return line.encode() + b"\n" + data

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays, about."""
        return sum(values.nbytes for values in self.arrays.values())


def frames_in(chunks: Iterable[bytes], limit: int) -> Iterator[Frame]:
    """The messages that some bytes are made of, each as soon as it is whole.

    Args:
        chunks: the bytes, cut anywhere.
        limit: bytes that one message may have.

    Raises:
        CutOffError: for bytes that end inside a message.
        InputError: for bytes that are no message, or exceed the limit.

    Examples:
        >>> [frame.content for frame in frames_in([Frame({"a": 1}).encoded()], limit=1000)]
        [{'a': 1}]
    """
    waiting, size, line = bytearray(), 0, None
    for chunk in chunks:
        waiting += chunk
        while True:
            if line is None:
                head, mark, rest = waiting.partition(b"\n")
                if len(head) > limit:
                    raise InputError(_too_long(limit))
                if not mark:
                    break
                line, waiting = _line(bytes(head)), rest
                size = line.pop(SIZE)
                if size > limit:
                    raise InputError(_too_long(limit))
            if len(waiting) < size:
                break
            yield Frame(line, arrays_in(bytes(waiting[:size])))
            waiting, line = waiting[size:], None
    if line is not None or waiting:
        raise CutOffError("A message is cut off: the connection ended before all of it had arrived.")


def read_frame(body: bytes) -> Frame:
    """The one message that a body consists of.

    Raises:
        InputError: if it is none, or more.
    """
    found = list(frames_in([body], len(body)))
    if len(found) != 1:
        raise InputError(f"A body holds one message, got {len(found)}.")
    return found[0]


def arrays_in(data: bytes) -> Arrays:
    """The arrays in bytes of safetensors.

    Raises:
        InputError: if they are something else.
    """
    if not data:
        return {}
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"The arrays of a message are not safetensors, or are damaged: {error}.") from error


def _line(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"A message begins with a line of JSON: {error}.") from error
    size = found.get(SIZE) if isinstance(found, dict) else None
    if type(size) is not int or size < 0:
        raise InputError(f"A message's line is an object that states {SIZE}, got {text[:80]!r}.")
    return found


def _too_long(limit: int) -> str:
    return f"A message is longer than the {limit:,} bytes that one may have; ask for less at a time."
