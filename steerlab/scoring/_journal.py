"""A journal of finished windows, from which an interrupted run resumes.

The first line says, as JSON, what is being measured. Each record after it holds the scores of a batch of windows and a
checksum; one that a killed process left incomplete is recognised by it and dropped.
"""

import fcntl
import glob
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from steerlab.core._files import remove_leftovers, write_atomic
from steerlab.core.errors import RunError
from steerlab.scoring.windows import TextWindow

_HEAD = struct.Struct("<4sQQ32s")
_MAGIC = b"NLL1"
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class Record:
    """The scores of a batch of windows.

    Attributes:
        first_scored: absolute position of the first token scored.
        stop: absolute position after the last one.
        digest: SHA-256 of the text's ids up to `stop`.
        nlls: their negative log-probabilities in nats, float32.
    """

    first_scored: int
    stop: int
    digest: bytes
    nlls: np.ndarray = field(repr=False)


class TextDigest:
    """SHA-256 of the ids of a text up to the end of the last window seen."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen = 0

    def add(self, window: TextWindow) -> None:
        """Takes in the tokens that no earlier window held."""
        new = window.ids[self._seen - window.start :]
        self._hash.update(np.asarray(new, dtype="<i8").tobytes())
        self._seen = window.stop

    def digest(self) -> bytes:
        """The hash of the tokens so far."""
        return self._hash.digest()


class Journal:
    """Finished windows on disk. One process at a time may hold it.

    Attributes:
        records: what earlier runs finished, in order.

    Args:
        path: the file, made if it is not there; in a folder, its `nlls.journal`.
        fingerprint: what is measured; a journal of something else is refused.

    Raises:
        RunError: if the file is not such a journal, belongs to another measurement, or is in use.
    """

    def __init__(self, path: str | Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = Path(path) / "nlls.journal" if Path(path).is_dir() else Path(path)
        if not self.path.exists():
            write_atomic(self.path, json.dumps(dict(fingerprint), sort_keys=True) + "\n")
        try:
            self._file: BinaryIO = open(self.path, "r+b")
        except OSError as error:
            raise RunError(f"Cannot open {self.path} to resume from: {error.strerror}.") from error
        try:
            self._lock()
            remove_leftovers(self.path.parent, glob.escape(self.path.name))
            check_fingerprint(self.path, self._fingerprint(), fingerprint)
            self.records = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, record: Record) -> None:
        """Adds a record; it is on disk when this returns."""
        body = _HEAD.pack(_MAGIC, record.first_scored, record.stop, record.digest)
        body += record.nlls.astype("<f4").tobytes()
        self._file.write(body + _CHECKSUM.pack(zlib.crc32(body)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"{self.path} is in use by another process; wait for it, or name another file.") from error

    def _fingerprint(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.readline())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RunError(f"{self.path} is not a journal of finished windows; name another file to resume from.")
        return found

    def _read(self) -> list[Record]:
        """The complete records; the file is cut after them."""
        found = []
        end = self._file.tell()
        while (record := _next_record(self._file)) is not None:
            found.append(record)
            end = self._file.tell()
        self._file.seek(end)
        self._file.truncate()
        return found


def _next_record(file: BinaryIO) -> Record | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, first_scored, stop, digest = _HEAD.unpack(head)
    if magic != _MAGIC or stop < first_scored:
        return None
    size = 4 * (stop - first_scored)
    if size > os.fstat(file.fileno()).st_size:
        return None
    rest = file.read(size + _CHECKSUM.size)
    body, checksum = rest[:size], rest[size:]
    if len(checksum) < _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != zlib.crc32(head + body):
        return None
    return Record(first_scored, stop, digest, np.frombuffer(body, dtype="<f4").astype(np.float32))


def check_fingerprint(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Checks that the measurement at a path is the requested one.

    Raises:
        RunError: otherwise; says what differs.
    """
    differing = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if differing:
        shown = "; ".join(f"{name} was {found.get(name)!r}, now {wanted.get(name)!r}" for name in differing)
        raise RunError(f"{path} belongs to another measurement: {shown}. Name another place, or delete this one.")
