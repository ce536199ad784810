"""The identity of a model's weights."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from steerlab.core._files import write_atomic
from steerlab.core._progress import progress
from steerlab.core.errors import InputError, ModelNotFoundError
from steerlab.models._cache import cache_root

SAMPLED_OVER = 4 << 30
_CHUNK = 1 << 22
_SAMPLE, _SAMPLES = 1 << 16, 256


def weight_files(directory: Path) -> list[Path]:
    """A model directory's weight files in order of name: the safetensors if there are any, else the `.bin` files."""
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))


def weights_hash(path: str | Path, *, full: bool = False) -> str:
    """The hash of a model: of its `config.json` and its weight files.

    Up to 4 GiB of weights are read whole. Of a larger model every file's name, size and first MiB count, and 256
    samples of 64 KiB at equal distances, so that its identity is known at once: another model, checkpoint or dtype has
    another hash, a few altered numbers between two samples do not change it. The result is remembered in the cache
    until a file's size or modification time changes; a large model that an earlier version of this package hashed
    whole keeps that hash.

    Args:
        path: A model directory.
        full: Read every byte, however large the model; half a gigabyte takes about a second.

    Returns:
        The sha256 as 64 hexadecimal digits.

    Raises:
        ModelNotFoundError: The directory has no `config.json` or no weights.
    """
    directory = Path(path).absolute()
    files = [directory / "config.json", *weight_files(directory)]
    if not files[0].is_file() or len(files) == 1:
        raise ModelNotFoundError(f"{directory} is not a model directory: it needs a config.json and weight files.")
    large = sum(file.stat().st_size for file in files) > SAMPLED_OVER
    sampled = large and not full
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    record = cache_root() / "hashes" / f"{hashlib.sha256(os.fsencode(directory)).hexdigest()}.json"
    known = _recall(record, stamp, sampled)
    if known is not None:
        return known
    digest = _sampled_digest(files) if sampled else _digest(files)
    if sampled or not large:
        with suppress(InputError):  # a cache that cannot be written only costs time
            _remember(record, stamp, digest, sampled)
    return digest


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _digest(files: list[Path]) -> str:
    sha = hashlib.sha256()
    total = sum(file.stat().st_size for file in files)
    with progress(total, "hash weights", "B", unit_scale=True) as bar:
        for file in files:
            sha.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as handle:
                while chunk := handle.read(_CHUNK):
                    sha.update(chunk)
                    bar.update(len(chunk))
    return sha.hexdigest()


def _sampled_digest(files: list[Path]) -> str:
    """Hash of a few MiB of each file; see `weights_hash`."""
    sha = hashlib.sha256(b"sampled\0")
    for file in files:
        size = file.stat().st_size
        sha.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as handle:
            sha.update(handle.read(1 << 20))
            for number in range(1, _SAMPLES + 1):
                handle.seek(max(0, size - _SAMPLE) * number // _SAMPLES)
                sha.update(handle.read(_SAMPLE))
    return sha.hexdigest()


def _recall(record: Path, stamp: list[list[str | int]], sampled: bool) -> str | None:
    """The remembered hash; one of every byte also where samples would do, unless it is known to be of samples."""
    try:
        known = json.loads(record.read_text())
        usable = known["files"] == stamp and (sampled or not known.get("sampled", False))
        return known["sha256"] if usable else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(record: Path, stamp: list[list[str | int]], digest: str, sampled: bool) -> None:
    write_atomic(record, json.dumps({"sha256": digest, "files": stamp, "sampled": sampled}))
