"""Running a sweep: what is there already is kept, the rest is measured, and all of it becomes one frame."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._hashing import content_hash
from steerlab.core._progress import progress
from steerlab.core.errors import InputError
from steerlab.display import Piece, Remarks, Shown, Table
from steerlab.experiment._store.cells import StoredCell
from steerlab.experiment.measurements.effect._comparisons import with_comparisons
from steerlab.experiment.scaling._cell import SweepCell, effect_of
from steerlab.experiment.scaling._folder import ROWS_FILE, SweepFolder, joined
from steerlab.experiment.scaling._worker import Outcome, SweepCheck, Task, Worker

Run = Callable[[Sequence[Task], SweepCheck], Generator[Outcome, None, None]]
FIGURES: Final = ["slope", "low", "high", "curvature", "anti_steerable", "collapse_dose", "null_rank", "adjusted_rank"]


@dataclass(frozen=True, repr=False)
class SweepResult(Shown):
    """The result of a sweep.

    Attributes:
        path: its folder; the rows are in `sweep.parquet` there.
        rows: a row per cell, arm, dose and item: `cell` (its number), the cell's settings, then the columns of an
            effect's rows and `ppl_ratio` of the dose; only of finished cells. None if no cell is finished.
        summary: a row per cell: `cell`, `key`, its settings, `doses`, `status` (`done` or `failed`), `verdict`, `slope`
            with the ends `low` and `high` of its interval, `curvature`, `anti_steerable`, `collapse_dose`,
            `null_rank`, `adjusted_rank` (Holm's, for every cell of the same items and metric), `error`.
        reused: cells that were there already.
        measured: cells that were measured now.
        warnings: what was warned of meanwhile, each once.
    """

    path: Path
    rows: pd.DataFrame | None = field(repr=False)
    summary: pd.DataFrame = field(repr=False)
    reused: int
    measured: int
    warnings: tuple[str, ...] = ()

    @property
    def failed(self) -> pd.DataFrame:
        """The cells that failed, as rows of the summary."""
        found: Any = self.summary[self.summary.status == "failed"]
        return found

    def _finding(self) -> str:
        return str(self)

    def _pieces(self) -> Sequence[Piece]:
        return [Remarks(self.warnings), Table.of_frame(self.summary, more=".summary")]

    def __str__(self) -> str:
        done = int((self.summary.status == "done").sum())
        rows = 0 if self.rows is None else len(self.rows)
        return (
            f"{done} of {len(self.summary)} cells are done ({self.reused} of them were there already), "
            f"{len(self.failed)} failed; {rows} rows in {self.path / ROWS_FILE}"
        )


def run_locally(tasks: Sequence[Task], check: SweepCheck) -> Generator[Outcome, None, None]:
    """Measures cells in this process, engine by engine."""
    worker = Worker(check)
    try:
        for task in in_engine_order(tasks):
            yield worker.run(task)
    finally:
        worker.close()


def in_engine_order(tasks: Sequence[Task]) -> list[Task]:
    """Tasks of one engine together, engines in order of their first task."""
    engines = list(dict.fromkeys(task.work.engine.name for task in tasks))
    return sorted(tasks, key=lambda task: engines.index(task.work.engine.name))


def run_sweep(
    cells: Sequence[SweepCell],
    path: str | Path,
    *,
    run: Run = run_locally,
    check: SweepCheck = SweepCheck(),  # noqa: B008  frozen
    overwrite: bool = False,
    about: Mapping[str, Any] | None = None,
) -> SweepResult:
    """Measures the cells of a sweep that are not finished yet, and writes all of them as one frame.

    Every finished cell is written at once; a killed sweep continues where it stopped, and an extended one measures what
    is new. A cell that fails is recorded, and tried again by the next run; the others continue.

    Args:
        cells: the cells, in the order of the frame; all with the same names in `settings`.
        path: the sweep's folder.
        run: what measures them: `run_locally`, or a `steerlab.experiment.scaling.RayWorkers`.
        check: the selfcheck of each engine.
        overwrite: remove what lies there first.
        about: what else to state in `sweep.json`.

    Returns:
        A `SweepResult`; its rows are the same whatever measured them.

    Raises:
        InputError: for no cells, or cells whose settings differ in name.
        RunError: if another process writes the folder, or a file in it is damaged.
    """
    _check_cells(cells)
    engines = {name: recipe.what() for name, recipe in {c.engine.name: c.engine for c in cells}.items()}
    tasks = [_task(cell, engines[cell.engine.name]) for cell in cells]
    folder = SweepFolder(Path(path), overwrite=overwrite)
    try:
        folder.state({**(about or {}), "cells": [task.key for task in tasks]})
        distinct = {task.key: task for task in tasks}  # two settings may come to the same measurement
        missing = [task for key, task in distinct.items() if folder.find(key, task.cell) is None]
        errors, warned = _measure(missing, folder, run, check)
        stored = {key: folder.find(key, task.cell) for key, task in distinct.items()}
        rows = joined([_rows(k, task, stored[task.key]) for k, task in enumerate(tasks) if stored[task.key]])
        summary = _summary(tasks, stored, errors)
        folder.write_frames(rows, summary)
    finally:
        folder.close()
    done = len(distinct) - len(missing)
    return SweepResult(Path(path), rows, summary, done, len(missing) - len(errors), warned)


def _measure(
    missing: Sequence[Task], folder: SweepFolder, run: Run, check: SweepCheck
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Measures and keeps cells; the errors by key, and what was warned of."""
    errors, warned = {}, {}
    if not missing:
        return errors, ()
    with progress(len(missing), "cells", "cell") as bar, contextlib.closing(run(missing, check)) as outcomes:
        for outcome in outcomes:
            folder.keep(outcome)
            warned |= dict.fromkeys(outcome.warnings)
            if outcome.data is None:
                errors[outcome.key] = outcome.error
            bar.update(1)
    return errors, tuple(warned)


def _check_cells(cells: Sequence[SweepCell]) -> None:
    if not cells:
        raise InputError("The sweep has no cells.")
    names = list(cells[0].settings)
    for cell in cells:
        if list(cell.settings) != names:
            raise InputError(f"Cells of one sweep have the same settings; got {names} and {list(cell.settings)}.")


def _task(work: SweepCell, engine: Mapping[str, Any]) -> Task:
    cell = work.cell(engine)
    return Task(content_hash([cell.kind, cell.what]), cell, work)


def _rows(number: int, task: Task, stored: StoredCell | None) -> pd.DataFrame:
    assert stored is not None
    frame = stored.frame.copy()
    for position, (name, value) in enumerate({"cell": number, **task.work.settings}.items()):
        frame.insert(position, name, value)
    return frame


def _summary(tasks: Sequence[Task], stored: Mapping[str, StoredCell | None], errors: Mapping[str, str]) -> pd.DataFrame:
    distinct = {key: effect_of(cell) for key, cell in stored.items() if cell is not None}
    effects = dict(zip(distinct, with_comparisons(list(distinct.values())), strict=True))
    rows = []
    for number, task in enumerate(tasks):
        effect = effects.get(task.key)
        doses = ", ".join(f"{dose:g}" for dose in sorted(task.work.doses))
        row = {"cell": number, "key": task.key, **task.work.settings, "doses": doses}
        row |= {"status": "failed", "verdict": None} | dict.fromkeys(FIGURES, np.nan)
        if effect is not None:
            low, high = effect.ci
            row |= {"status": "done", "verdict": effect.verdict, "low": low, "high": high}
            row |= {name: getattr(effect, name) for name in FIGURES if name not in ("low", "high")}
        rows.append(row | {"error": errors.get(task.key, "")})
    return pd.DataFrame(rows)
