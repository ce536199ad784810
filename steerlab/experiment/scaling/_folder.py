"""The folder of a sweep: a file per finished cell, what failed, and the frames made of them."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core._files import remove_leftovers, write_atomic
from steerlab.core._json import json_text
from steerlab.core.errors import RunError
from steerlab.experiment._store.cells import Cell, StoredCell, unpack
from steerlab.experiment._store.locking import RunLock
from steerlab.experiment._store.run_folder import RUN_FILE, RunFolder, read_bytes, refuse_foreign
from steerlab.experiment.scaling._cell import KIND
from steerlab.experiment.scaling._worker import Outcome

SWEEP_FILE = "sweep.json"
ROWS_FILE = "sweep.parquet"
SUMMARY_FILE = "summary.parquet"
ERRORS = "errors"
_FORMAT = 1


class SweepFolder:
    """A folder that one process writes. Every file is written atomically; a killed sweep leaves its finished cells.

    Attributes:
        path: where it is.

    Args:
        path: where it is, or shall be.
        overwrite: remove the sweep that lies there.

    Raises:
        RunError: if another process writes it, it cannot be made, or it holds an experiment's run; with `overwrite`, if
            it holds other files and no sweep.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        if (path / RUN_FILE).exists():
            raise RunError(f"{path} holds the run of an experiment; give the sweep another name or root.")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"The folder {path} cannot be made: {error.strerror or error}.") from error
        self._lock = RunLock(path)
        self._folder = RunFolder(path)
        try:
            if overwrite and not (path / SWEEP_FILE).exists():
                refuse_foreign(self._folder)
            self._folder.repair(SWEEP_FILE, ROWS_FILE, SUMMARY_FILE)
            remove_leftovers(path / ERRORS, "*.json")
            if overwrite:
                self.clear()
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Gives the folder to other processes."""
        self._lock.release()

    def clear(self) -> None:
        """Removes what a sweep wrote; nothing else in the folder is touched."""
        for name in (SWEEP_FILE, ROWS_FILE, SUMMARY_FILE):
            (self.path / name).unlink(missing_ok=True)
        for leftover in (self.path / ERRORS).glob("*.json"):
            leftover.unlink()
        self._folder.clear()

    def find(self, key: str, cell: Cell) -> StoredCell | None:
        """A finished cell; None if it is not finished.

        Raises:
            RunError: for a damaged file, or one that holds another cell.
        """
        place = _place(key)
        if not (self.path / place).exists():
            return None
        stored = unpack(read_bytes(self.path / place), self.path / place)
        if dict(stored.cell.what) != json.loads(json.dumps(dict(cell.what))):
            raise RunError(f"{self.path / place} holds another cell than its name says; delete it to measure it again.")
        return stored

    def keep(self, outcome: Outcome) -> None:
        """Writes what came of a cell: its file, or its error. An error never replaces a finished cell."""
        error = self.path / ERRORS / f"{outcome.key}.json"
        if outcome.data is None:
            stated = {"error": outcome.error, "worker": outcome.worker, "traceback": outcome.trace}
            write_atomic(error, json_text(stated))
            return
        self._folder.write(_place(outcome.key), outcome.data)
        error.unlink(missing_ok=True)

    def state(self, stated: Mapping[str, Any]) -> None:
        """Writes what the sweep is."""
        write_atomic(self.path / SWEEP_FILE, json_text({"format": _FORMAT, **stated}))

    def write_frames(self, rows: pd.DataFrame | None, summary: pd.DataFrame) -> None:
        """Writes the rows of finished cells, if there are any, and the row per cell."""
        if rows is None:
            (self.path / ROWS_FILE).unlink(missing_ok=True)
        else:
            write_atomic(self.path / ROWS_FILE, _parquet(rows))
        write_atomic(self.path / SUMMARY_FILE, _parquet(summary))


def joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    """Frames one under the other; None if there is none."""
    return pd.concat(list(frames), ignore_index=True) if frames else None


def _place(key: str) -> str:
    return f"cells/{KIND}/{key}.parquet"


def _parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()
