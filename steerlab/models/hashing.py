"""The identity of a model's weights."""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from steerlab.core.errors import ModelNotFoundError
from steerlab.models.cache import cache_root

_CHUNK = 1 << 22


def weight_files(directory: Path) -> list[Path]:
    """List a model directory's weight files by name: the safetensors if there are any, else the `.bin` files."""
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))


def weights_hash(path: str | Path) -> str:
    """Hash a model: its `config.json` and every weight file, names and bytes.

    Reading half a gigabyte takes about a second, so the result is remembered in the cache, and read again whenever a
    file's size or modification time has changed.

    Args:
        path: A model directory.

    Returns:
        The sha256 as 64 hexadecimal digits.

    Raises:
        ModelNotFoundError: The directory has no `config.json` or no weights.
    """
    directory = Path(path).absolute()
    files = [directory / "config.json", *weight_files(directory)]
    if not files[0].is_file() or len(files) == 1:
        raise ModelNotFoundError(f"{directory} is not a model directory: it needs a config.json and weight files.")
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    record = cache_root() / "hashes" / f"{hashlib.sha256(os.fsencode(directory)).hexdigest()}.json"
    known = _recall(record, stamp)
    if known is not None:
        return known
    digest = _digest(files)
    with suppress(OSError):  # a cache that cannot be written only costs time
        _remember(record, stamp, digest)
    return digest


def file_hash(path: Path) -> str:
    """Hash one file's bytes with sha256."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _digest(files: list[Path]) -> str:
    sha = hashlib.sha256()
    for file in files:
        sha.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as handle:
            while chunk := handle.read(_CHUNK):
                sha.update(chunk)
    return sha.hexdigest()


def _recall(record: Path, stamp: list[list[str | int]]) -> str | None:
    try:
        known = json.loads(record.read_text())
        return known["sha256"] if known["files"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(record: Path, stamp: list[list[str | int]], digest: str) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=record.parent)
    with os.fdopen(handle, "w") as out:
        json.dump({"sha256": digest, "files": stamp}, out)
    os.replace(temporary, record)
