"""Verification: is a run still what was written, and does the model still say the same?"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._numbers import check_integer, check_number
from steerlab.core._seeds import check_single_seed
from steerlab.core.errors import RunError, SteerlabError, UnknownOperatorError
from steerlab.display import Fold, Piece, Remarks, Shown, Table
from steerlab.experiment._store.cell_engine import score_rows_again
from steerlab.experiment._store.session import Session
from steerlab.experiment.measurements._registry import MEASUREMENTS

COLUMNS = ["check", "item", "ok", "detail"]
# Largest difference, in nats, that a repeated measurement may show: order of summation changes with batch and kernel.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
LOW_PRECISION_TOLERANCE = 0.1
_NOT_READ = "not read, which says nothing about damage: "


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What a verification found.

    Attributes:
        table: a row per check: `check` (`file`, `input`, `cell`, `effect` or `rerun`), `item`, `ok`, `detail`.
    """

    table: pd.DataFrame

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return bool(self.table.ok.all())

    @property
    def failures(self) -> pd.DataFrame:
        """The checks that failed."""
        return self.table.loc[~self.table.ok].reset_index(drop=True)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in self.table["check"].value_counts(sort=False).items())
        if self.ok:
            return f"verified: {counts}"
        found = [f"  {row['check']} {row['item']}: {row['detail']}" for row in self.failures.to_dict("records")]
        return "\n".join([f"NOT verified: {len(found)} of {len(self.table)} checks failed ({counts})", *found])

    def _finding(self) -> str:
        return f"ok={self.ok}, {len(self.table)} checks"

    def _pieces(self) -> Sequence[Piece]:
        failed = Table.of_frame(self.failures, caption="failed") if not self.ok else Remarks([str(self)])
        return [failed, Fold("all checks", [Table.of_frame(self.table, more=".table")])]


def verify(session: Session, *, n: int = 3, seed: int = 0, tolerance: float | None = None) -> Verification:
    """Checks every file of a run against the manifest, every input and cell against its name, and n cells by rerun.

    Args:
        session: the run.
        n: cells to measure again; 0 needs no model.
        seed: of the choice of cells.
        tolerance: the largest difference a repeated figure may show, in nats; by dtype if None.
    """
    tolerance = None if tolerance is None else check_number(tolerance, "tolerance, in nats,", least=0, infinite=True)
    seed = check_single_seed(seed)
    n = check_integer(n, "n, the number of cells to measure again,", least=0)
    rows = [*_files(session), *_inputs(session), *_cells(session), *_figures(session)]
    rows = _unread_once([*rows, *_reruns(session, n, seed, tolerance)])
    return Verification(pd.DataFrame(rows, columns=COLUMNS).astype({"ok": bool}))


def _row(check: str, item: str, problem: str = "", fine: str = "") -> tuple[str, str, bool, str]:
    return (check, item, not problem, problem or fine)


def _unread_once(rows: list[tuple]) -> list[tuple]:
    """The same rows, those that were not read for the same reason as one row with their number."""
    unread: dict[tuple[str, str], list[str]] = {}
    for check, item, _, detail in rows:
        if detail.startswith(_NOT_READ):
            unread.setdefault((check, detail), []).append(item)
    found = [row for row in rows if not row[3].startswith(_NOT_READ)]
    for (check, detail), items in unread.items():
        several = f" and {len(items) - 1} more ({len(items)} in all)" if len(items) > 1 else ""
        found.append(_row(check, items[0] + several, detail))
    return found


def _files(session: Session) -> Iterator[tuple]:
    if session.folder is None:
        return
    manifest = session.folder.manifest()
    for place, wanted in manifest.items():
        path = session.folder.path / place
        if not path.is_file():
            yield _row("file", place, "it is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            yield _row("file", place, "its bytes are not those that were written")
        else:
            yield _row("file", place)
    for place in session.folder.files():
        if place not in manifest:
            yield _row("file", place, "it is not in the manifest")


def _inputs(session: Session) -> Iterator[tuple]:
    for place in session.inputs.stored():
        yield _row("input", place, _problem(lambda place=place: session.inputs.check(place)))


def _cells(session: Session) -> Iterator[tuple]:
    for place in session.cells.stored():
        yield _row("cell", place, _problem(lambda place=place: _check_cell(session, place)))


def _check_cell(session: Session, place: str) -> None:
    key = session.cells.read(place).key
    if key != PurePosixPath(place).stem:
        raise RunError(f"it holds the cell {key}")


def _figures(session: Session) -> Iterator[tuple]:
    """Figures that follow from the rows beside them; a stated figure that does not was changed."""
    checks = {m.kind.name: (m.kind, m.check) for m in MEASUREMENTS if m.check is not None}
    for record in session.records if session.folder is not None else ():
        if record["kind"] in checks:
            kind, check = checks[record["kind"]]
            place = kind.pattern.format(record["number"])
            yield _row(kind.name, place, _problem(partial(check, session.path / place)))


def _problem(check: Callable[[], None]) -> str:
    try:
        check()
    except UnknownOperatorError as error:
        return f"{_NOT_READ}{error}"
    except (SteerlabError, ValueError, KeyError, TypeError) as error:
        return str(error) or type(error).__name__
    return ""


# --- measuring again ----------------------------------------------------------------------------------------------


def _reruns(session: Session, n: int, seed: int, tolerance: float | None) -> list[tuple]:
    places = [place for place in session.cells.stored() if PurePosixPath(place).parent.name in RERUNS]
    chosen = sorted(np.random.default_rng(seed).permutation(len(places))[:n]) if n else []
    found = []
    for index in chosen:
        detail, problem = _rerun(session, places[index], tolerance)
        found.append(_row("rerun", places[index], problem, detail))
    return found


def _rerun(session: Session, place: str, tolerance: float | None) -> tuple[str, str]:
    """What a repeated measurement gives: a note, and a problem if there is one."""
    try:
        stored = session.cells.read(place)
        if stored.cell.about.get("weights_hash") not in (None, session.info.weights_hash):
            return "of another model than the run's, so it was not measured again", ""
        again = RERUNS[stored.cell.kind](session, stored)
    except UnknownOperatorError as error:
        return "", f"{_NOT_READ}{error}"
    except (SteerlabError, ValueError, KeyError, TypeError) as error:
        return "", f"it could not be measured again: {error}"
    allowed = TOLERANCES.get(session.info.dtype, LOW_PRECISION_TOLERANCE) if tolerance is None else tolerance
    note = "" if stored.engine_hash == session.engine_hash else " (by another engine or with other versions than then)"
    difference, column = largest_difference(stored.frame, again)
    detail = f"largest difference {difference:.2g} in {column}, {allowed:.2g} allowed{note}"
    return detail, "" if difference <= allowed else detail


def largest_difference(before: pd.DataFrame, after: pd.DataFrame) -> tuple[float, str]:
    """The largest difference between two frames of one measurement, and its column; infinite if they do not match.

    Columns that are not floating-point must agree exactly; lists are compared entry by entry.
    """
    if list(before.columns) != list(after.columns) or len(before) != len(after):
        return math.inf, "the shape"
    worst, where = 0.0, "any column"
    for name in before.columns:
        difference = _difference(before[name].tolist(), after[name].tolist())
        if difference > worst:
            worst, where = difference, name
    return worst, where


def _difference(before: list[Any], after: list[Any]) -> float:
    differences = [_distance(b, a) for b, a in zip(before, after, strict=True)]
    return max(differences, default=0.0)


def _distance(before: Any, after: Any) -> float:
    if isinstance(before, list | tuple | np.ndarray):
        return math.inf if len(before) != len(after) else _difference(list(before), list(after))
    if isinstance(before, float) and isinstance(after, float):
        missing = math.isnan(before) and math.isnan(after)
        difference = 0.0 if missing or before == after else abs(before - after)
        return math.inf if math.isnan(difference) else difference
    return 0.0 if before == after else math.inf


RERUNS: Final = {"score_rows": score_rows_again} | {
    kind: again for measurement in MEASUREMENTS for kind, again in measurement.reruns.items()
}
