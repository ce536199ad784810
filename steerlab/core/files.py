"""Writing files so that a reader sees the old content or the new, never half of it."""

import os
import tempfile
from pathlib import Path

from steerlab.core.errors import InputError


def write_atomic(path: str | Path, data: bytes | str) -> Path:
    """Writes a file through a temporary one beside it and a rename; makes the parent folder.

    Returns:
        The path written.

    Raises:
        InputError: if the file cannot be written there.
    """
    path = Path(path)
    payload = data.encode("utf-8") if isinstance(data, str) else data
    try:
        return _write(path, payload)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from error


def _write(path: Path, payload: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
