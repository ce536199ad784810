"""Cells: finished measurements, each stored under the hash of everything that determines it.

A cell is the smallest piece of work that is stored: one plan on one set of items, one plan on one set of texts.
A run that was killed, or a notebook that is run again, finds its cells and measures only what is missing.
"""

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from steerlab.core._hashing import content_hash
from steerlab.core.errors import RunError
from steerlab.experiment._store.run_folder import RunFolder, read_bytes
from steerlab.experiment._store.waiting import Waiting

CELL_FORMAT = 1
_META = b"steerlab"


@dataclass(frozen=True)
class Cell:
    """What one measurement is.

    Attributes:
        kind: what is measured, e.g. `scores`; a folder name.
        what: everything that determines the numbers besides the engine: hashes of plan and data, policy, seed, options;
            JSON-serialisable.
        about: what helps to measure it again (which stored plan, scaled by what) and determines nothing further.
    """

    kind: str
    what: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def key(self, engine_hash: str) -> str:
        """Content hash under an engine: 16 hexadecimal digits."""
        return content_hash({"format": CELL_FORMAT, "kind": self.kind, "engine": engine_hash, "what": self.what})


@dataclass(frozen=True)
class StoredCell:
    """A cell that was read back.

    Attributes:
        cell: what was measured.
        engine_hash: by which engine.
        frame: the result.
    """

    cell: Cell
    engine_hash: str
    frame: pd.DataFrame

    @property
    def key(self) -> str:
        """The key it belongs under."""
        return self.cell.key(self.engine_hash)


class Cells:
    """Finished cells of one experiment, on disk or in memory.

    Attributes:
        reused: cells that were found rather than measured, so far.
        measured: cells that were measured, so far.
        resumed: how many of those found were there before, from an earlier run.
        announced: whether a `ResumeNotice` has been written.

    Args:
        folder: the run directory; None for memory only.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder = folder
        self._memory: dict[str, bytes] = {}
        self._own: set[str] = set()
        self.reused = self.measured = self.resumed = 0
        self.announced = False

    def find(self, cell: Cell, engine_hash: str) -> pd.DataFrame | None:
        """The result of a finished cell; None if it was not measured yet.

        Raises:
            RunError: for a damaged file, or one that holds another cell.
        """
        place = _place(cell.kind, cell.key(engine_hash))
        data = self._read(place)
        if data is None:
            return None
        stored = unpack(data, place)
        if stored.key != cell.key(engine_hash):
            raise RunError(f"{place} holds another cell than its name says; delete it to measure it again.")
        self.reused += 1
        self.resumed += place not in self._own
        return stored.frame

    def add(self, cell: Cell, engine_hash: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Stores a result; returns it as a later run will read it."""
        place, data = _place(cell.kind, cell.key(engine_hash)), pack(cell, engine_hash, frame)
        if self._folder is None:
            self._memory[place] = data
        else:
            self._folder.write(place, data)
        self._own.add(place)
        self.measured += 1
        return unpack(data, place).frame

    def get(self, cell: Cell, engine_hash: str, measure: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """The result of a cell, measured if it was not yet."""
        found = self.find(cell, engine_hash)
        return self.add(cell, engine_hash, measure()) if found is None else found

    def stored(self) -> list[str]:
        """Places of all finished cells, in order."""
        if self._folder is None:
            return sorted(self._memory)
        return [name for name in self._folder.files() if name.startswith("cells/")]

    def read(self, place: str) -> StoredCell:
        """A finished cell by its place.

        Raises:
            RunError: if it is missing or damaged.
        """
        data = self._read(place)
        if data is None:
            raise RunError(f"There is no cell {place}.")
        return unpack(data, place)

    def _read(self, place: str) -> bytes | None:
        if self._folder is None:
            return self._memory.get(place)
        path = self._folder.path / place
        return read_bytes(path) if path.exists() else None


class ResumeNotice:
    """Writes to standard error how many cells of a measurement an earlier run had finished.

    Once per run; cells that measurements of one run share do not count.

    Args:
        cells: the experiment's cells.
        what: the measurement's name.
    """

    def __init__(self, cells: Cells, what: str) -> None:
        self._cells, self._what = cells, what

    def __enter__(self) -> "ResumeNotice":
        self._before, self._waiting = self._counts(), Waiting(self._what)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._waiting.end()
        resumed, reused, measured = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        if resumed and kind is None and not self._cells.announced:
            self._cells.announced = True
            found = f"{resumed} of {reused + measured} cells were there already"
            sys.stderr.write(f"info: {self._what}: {found}, from an earlier run; what follows is not told again\n")

    def _counts(self) -> tuple[int, int, int]:
        return self._cells.resumed, self._cells.reused, self._cells.measured


def pack(cell: Cell, engine_hash: str, frame: pd.DataFrame) -> bytes:
    """Parquet bytes of a result, with what it is in the file's metadata."""
    stated = {"kind": cell.kind, "what": dict(cell.what), "about": dict(cell.about), "engine": engine_hash}
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _META: json.dumps(stated).encode()})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def unpack(data: bytes, place: str | Path) -> StoredCell:
    """The cell that `pack` made bytes of.

    Raises:
        RunError: if they are damaged.
    """
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()  # without what a folder of files takes
        stated = json.loads((table.schema.metadata or {})[_META])
        cell = Cell(stated["kind"], stated["what"], stated["about"])
        return StoredCell(cell, stated["engine"], table.to_pandas())
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"The cell {place} is damaged ({error}); delete it to measure it again.") from error


def _place(kind: str, key: str) -> str:
    return f"cells/{kind}/{key}.parquet"


def join(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Frames one under the other, with a plain index."""
    return pd.concat(list(frames), ignore_index=True)
