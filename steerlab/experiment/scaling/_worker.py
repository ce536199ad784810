"""A worker of a sweep: keeps one engine and measures cells on it, one after another."""

import os
import socket
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from steerlab.core._warning import SteerlabWarning
from steerlab.core.errors import EngineError
from steerlab.experiment._store.cells import Cell, pack
from steerlab.experiment.experiment import Experiment
from steerlab.experiment.scaling._cell import EngineRecipe, SweepCell


@dataclass(frozen=True)
class SweepCheck:
    """The selfcheck of each engine, before its first cell.

    Attributes:
        run: whether it runs.
        allow_failure: measure on after a failure.
        tolerance: the largest deviation in nats; by default that of engine and dtype.
    """

    run: bool = True
    allow_failure: bool = False
    tolerance: float | None = None


@dataclass(frozen=True)
class Task:
    """A cell to be measured.

    Attributes:
        key: names its file.
        cell: what is kept beside the numbers.
        work: how it is measured.
    """

    key: str
    cell: Cell
    work: SweepCell


@dataclass(frozen=True)
class Outcome:
    """How a cell ended.

    Attributes:
        key: of its task.
        data: the bytes of its file; None if it failed.
        error: what went wrong, in one sentence; empty if nothing did.
        trace: the traceback.
        worker: host and process that ran it.
        warnings: what was warned of meanwhile.
    """

    key: str
    data: bytes | None = field(repr=False)
    error: str = ""
    trace: str = field(default="", repr=False)
    worker: str = ""
    warnings: tuple[str, ...] = ()


class Worker:
    """Measures cells, and keeps its engine as long as the next cell is for the same one.

    Args:
        check: the selfcheck of each engine.
        threads: threads of torch; numbers on a CPU depend on how many there are. None leaves them as they are.
    """

    def __init__(self, check: SweepCheck, threads: int | None = None) -> None:
        self._check = check
        self._name: str | None = None
        self._owner: Experiment | None = None
        self._broken: Exception | None = None
        if threads is not None:
            torch.set_num_threads(threads)

    def identity(self) -> str:
        """Host and process; an answer says that the worker is there."""
        return f"{socket.gethostname()}:{os.getpid()}"

    def run(self, task: Task) -> Outcome:
        """Measures a cell; whatever goes wrong in it becomes part of the outcome, so that others continue."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                data, error, trace = self._measured(task), "", ""
            except Exception as failure:
                data, error, trace = None, f"{type(failure).__name__}: {failure}", traceback.format_exc()
                if isinstance(failure, EngineError):
                    self.close()  # its processes are gone; the next cell starts another
        return Outcome(task.key, data, error, trace, self.identity(), _own(caught))

    def close(self) -> None:
        """Frees the engine."""
        owner, self._owner, self._name, self._broken = self._owner, None, None, None
        if owner is not None:
            owner.close()

    def _measured(self, task: Task) -> bytes:
        owner = self._engine_of(task.work.engine)
        engine_hash = owner.configuration()["engine_hash"]
        rows, about = task.work.measure(owner.engine, engine_hash)
        return pack(Cell(task.cell.kind, task.cell.what, about), engine_hash, rows)

    def _engine_of(self, recipe: EngineRecipe) -> Experiment:
        """The running engine of a recipe; one that could not start is not tried again for the next cell."""
        if self._name != recipe.name:
            self.close()
            self._name = recipe.name
            try:
                self._owner = _start(recipe, self._check)
            except Exception as error:
                self._broken = error
        if self._broken is not None:
            raise self._broken
        assert self._owner is not None
        return self._owner


def _start(recipe: EngineRecipe, check: SweepCheck) -> Experiment:
    owner = Experiment("sweep", recipe.model, backend=recipe.backend, root=None, **recipe.options)
    try:
        owner.engine  # noqa: B018  loads it
        if check.run:
            owner.selfcheck(allow_failure=check.allow_failure, tolerance=check.tolerance)
    except BaseException:
        owner.close()
        raise
    return owner


def _own(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """Warnings of steerlab itself, each once."""
    own = [str(w.message) for w in caught if issubclass(w.category, SteerlabWarning)]
    return tuple(dict.fromkeys(own))
