"""Files of a run directory: written atomically, and listed with their hashes in an append-only manifest."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steerlab.core._files import encoded, remove_leftovers, write_atomic
from steerlab.core.errors import RunError

MANIFEST_FILE = "manifest.jsonl"
FOLDERS = ("cells", "inputs", "effects", "frames", "findings", "vectors", "looks")
RUN_FILE = "run.json"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"
HOLDER_FILE = ".lock.json"


class RunFolder:
    """A run directory.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, relative: str, data: bytes | str) -> Path:
        """Writes a file atomically and enters its hash in the manifest."""
        payload = encoded(data, relative)
        path = write_atomic(self.path / relative, payload)
        self.enter(relative, payload)
        return path

    def enter(self, relative: str, payload: bytes) -> None:
        """Enters a file's hash in the manifest; the last entry of a path counts."""
        line = json.dumps({"path": relative, "sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)})
        with (self.path / MANIFEST_FILE).open("ab") as file:
            file.write(line.encode() + b"\n")

    def repair(self, *names: str) -> None:
        """Tidies up after a run that was killed; the caller holds the folder's lock.

        Half-written files go, a torn line of the manifest ends, and whole files that were not entered yet are.

        Args:
            *names: further files that the caller writes directly in the folder.
        """
        remove_leftovers(self.path, RUN_FILE, REPORT_FILE, HOLDER_FILE, *names)
        for name in FOLDERS:
            for leftover in (self.path / name).rglob(".*.tmp"):
                leftover.unlink()
        manifest = self.path / MANIFEST_FILE
        if manifest.exists() and not manifest.read_bytes().endswith(b"\n"):
            with manifest.open("ab") as file:
                file.write(b"\n")
        known = self.manifest()
        for relative in self.files():
            if relative not in known:
                self.enter(relative, (self.path / relative).read_bytes())

    def manifest(self) -> dict[str, str]:
        """SHA-256 of every file entered, by its path relative to the run directory.

        A line that is not whole counts as not written: a run may have been killed in the middle of it.

        Raises:
            RunError: if it cannot be read.
        """
        try:
            lines = (self.path / MANIFEST_FILE).read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RunError(f"{self.path / MANIFEST_FILE} cannot be read: {error}.") from error
        found = {}
        for line in lines:
            try:
                entry = json.loads(line)
                found[str(entry["path"])] = str(entry["sha256"])
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def files(self) -> Iterator[str]:
        """Every file of the run's own folders, relative, in order of name."""
        for folder in FOLDERS:
            for path in sorted((self.path / folder).rglob("*")):
                if path.is_file() and not path.name.startswith("."):
                    yield path.relative_to(self.path).as_posix()

    def clear(self) -> None:
        """Removes what a run wrote; nothing else in the directory is touched."""
        (self.path / RUN_FILE).unlink(missing_ok=True)  # first: a half-cleared directory must not be taken for a run
        for folder in FOLDERS:
            shutil.rmtree(self.path / folder, ignore_errors=True)
        for name in (REPORT_FILE, MANIFEST_FILE):
            (self.path / name).unlink(missing_ok=True)


def refuse_foreign(folder: RunFolder) -> None:
    """Checks that a folder to be overwritten is empty, or holds what we wrote.

    Raises:
        RunError: if it holds other files.
    """
    found = [entry.name for entry in folder.path.iterdir() if not entry.name.startswith(".lock")]
    if found and MANIFEST_FILE not in found:
        shown = ", ".join(sorted(found)[:3]) + (", …" if len(found) > 3 else "")
        raise RunError(
            f"{folder.path} holds no run that overwrite=True could replace, but other files ({shown}). Choose another "
            "name or root, or empty the folder yourself."
        )


def read_bytes(path: Path) -> bytes:
    """The bytes of a file of a run.

    Raises:
        RunError: if it is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


def read_json(path: Path) -> Any:
    """Reads a JSON file of a run.

    Raises:
        RunError: if it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from error
