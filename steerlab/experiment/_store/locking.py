"""One writer per run directory: an advisory lock that ends with its process, however that ends."""

import json
import os
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from steerlab.core._files import write_atomic
from steerlab.core.errors import RunError
from steerlab.experiment._store.run_folder import HOLDER_FILE, LOCK_FILE

_guard = threading.Lock()
_held: dict[Path, "_Shared"] = {}


class _Shared:
    """A lock this process holds, and how many of its experiments use it."""

    def __init__(self, lock: FileLock) -> None:
        self.lock = lock
        self.users = 0
        self.pid = os.getpid()  # a forked child must not think that it holds its parent's lock


class RunLock:
    """The right to write a run directory.

    The operating system holds the lock and drops it when the process ends, so a killed run never blocks the next one.
    Experiments of one process share it: opening a run again in a notebook must not lock the notebook out.

    Args:
        folder: the run directory, which must exist.

    Raises:
        RunError: if another process holds it; names that process and its host.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._released = False
        with _guard:
            shared = _held.get(self.folder)
            if shared is None or shared.pid != os.getpid():
                shared = _held[self.folder] = _Shared(_acquire(self.folder))
            shared.users += 1
            self._shared = shared

    def release(self) -> None:
        """Gives the right back; the last user in this process frees the directory for others."""
        with _guard:
            if self._released or self._shared.pid != os.getpid():
                return
            self._released = True
            self._shared.users -= 1
            if self._shared.users == 0:
                (self.folder / HOLDER_FILE).unlink(missing_ok=True)
                self._shared.lock.release()
                _held.pop(self.folder, None)


def _acquire(folder: Path) -> FileLock:
    lock = FileLock(folder / LOCK_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except PermissionError as error:
        raise RunError(
            f"{folder} may not be written by this user ({error.strerror}). Choose another name or root, or open the "
            "run for reading with Experiment.load."
        ) from error
    except Timeout as error:
        raise RunError(
            f"{folder} is being written by another process ({_holder(folder)}). Wait for it or end it, choose another "
            "name or root, or open the run for reading with Experiment.load."
        ) from error
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_atomic(
        folder / HOLDER_FILE, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n"
    )
    return lock


def _holder(folder: Path) -> str:
    try:
        stated = json.loads((folder / HOLDER_FILE).read_text(encoding="utf-8"))
        return f"pid {stated['pid']} on {stated['host']}, since {stated['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"unknown; it left no {HOLDER_FILE}"
