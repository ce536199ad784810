"""Measuring the cells of a sweep on Ray: one engine per worker, and what a lost worker had is done by another."""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from steerlab.core.errors import BackendMissingError, EngineError, InputError
from steerlab.experiment.scaling.worker import Outcome, SweepCheck, Task, Worker

MAX_LOSSES: Final = 3
"""How many workers a cell may take down with it, and how many may fail to start, before it is given up."""
LOOK_AFTER: Final = 5.0
"""Seconds without news after which the cluster's machines are looked at."""


@dataclass(frozen=True)
class RayWorkers:
    """Measures cells on Ray: on the cluster that `ray start` or RAY_ADDRESS names, else on one of this machine.

    Workers send finished cells back, and only this process writes; no folder need be shared. Every worker uses as many
    threads of torch as this process would, so that rows equal those of a sweep in this process to the bit where
    machines are alike.

    Args:
        workers: how many; by default one per share of GPUs, and without GPUs one per machine.
        gpus_per_worker: GPUs of each worker's engine, or a share of one; by default 1 if the cluster has any, else 0.
        cpus_per_worker: CPUs that each worker reserves.
        patience: seconds to wait for another machine when the last one that can hold a worker is gone.

    Raises:
        InputError: for a number that cannot be.

    Examples:
        >>> RayWorkers(workers=2, gpus_per_worker=1)
        RayWorkers(workers=2, gpus_per_worker=1, cpus_per_worker=1)
    """

    workers: int | None = None
    gpus_per_worker: float | None = None
    cpus_per_worker: float = 1
    patience: float = field(default=60.0, repr=False)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers is an integer ≥ 1, got {self.workers!r}.")
        for name in ("gpus_per_worker", "cpus_per_worker"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and (value <= 1 or value == int(value))):
                raise InputError(f"{name} is a whole number, or a share between 0 and 1, got {value!r}.")

    def __call__(self, tasks: Sequence[Task], check: SweepCheck) -> Generator[Outcome, None, None]:
        """Measures tasks; outcomes come as they are finished.

        Raises:
            BackendMissingError: if Ray is not installed.
            EngineError: if no cluster can be reached, no worker can be started on it, or its machines are gone.
            InputError: if no machine of the cluster has what a worker asks for.
        """
        ray = require_ray()
        with _cluster(ray):
            gpus, size = self._resources(ray, len(tasks))
            options = {"num_cpus": self.cpus_per_worker, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
            remote = ray.remote(Worker).options(max_restarts=0, **options)
            hope = _Hope({"GPU": gpus, "CPU": self.cpus_per_worker}, self.patience)
            pool = _Pool(ray, hope, lambda: remote.remote(check, torch.get_num_threads()), size, tasks)
            try:
                yield from pool.outcomes()
            finally:
                pool.close()

    def _resources(self, ray: Any, n_tasks: int) -> tuple[float, int]:
        """GPUs of a worker, and how many workers to start."""
        nodes = list(_alive(ray).values())
        gpus = self.gpus_per_worker
        if gpus is None:
            gpus = 1 if any(node.get("GPU") for node in nodes) else 0
        wanted = {"GPU": gpus, "CPU": self.cpus_per_worker}
        places = sum(_fitting(node, wanted) for node in nodes)
        if not places:
            have = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise InputError(
                f"A worker asks for {self.cpus_per_worker:g} CPUs and {gpus:g} GPUs of one machine; the cluster's "
                f"machines have {have}. Ask for less with gpus_per_worker and cpus_per_worker, or add machines."
            )
        asked = (places if gpus else len(nodes)) if self.workers is None else self.workers
        return gpus, min(asked, places, n_tasks)


def require_ray() -> Any:
    """The module `ray`.

    Raises:
        BackendMissingError: if it is not installed; names the install command.
    """
    try:
        import ray
    except ImportError as error:
        raise BackendMissingError(
            "Running a sweep on Ray needs Ray, which is not installed: pip install 'steerlab[ray]'. Without --ray the "
            "sweep runs in this process, with the same rows."
        ) from error
    return ray


class _Hope:
    """That a worker can start on some machine, for as long as one has patience without."""

    def __init__(self, wanted: Mapping[str, float], patience: float) -> None:
        self._wanted, self._patience = wanted, patience
        self._without_since: float | None = None

    def check(self, machines: Iterable[Mapping[str, float]], left: int) -> None:
        """Nothing, as long as a worker fits on a machine, or one may still come.

        Args:
            machines: resources of those that are alive.
            left: cells that are not measured yet.

        Raises:
            EngineError: if there was none for longer than the patience.
        """
        if any(_fitting(resources, self._wanted) for resources in machines):
            self._without_since = None
            return
        now = time.monotonic()
        self._without_since = now if self._without_since is None else self._without_since
        if now - self._without_since >= self._patience:
            asked = " and ".join(f"{share:g} {name}" for name, share in self._wanted.items() if share)
            raise EngineError(
                "The Ray cluster has lost its machines: none is left with what a worker asks for "
                f"({asked or 'a place'}), and {left} cells are not measured; finished ones are kept. Add a machine "
                "(ray start --address=…) and run the sweep again, or run it without --ray."
            )


def _alive(ray: Any) -> dict[str, Mapping[str, float]]:
    """Resources of every machine of the cluster that is alive, by its id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _fitting(node: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """How many workers fit on a machine."""
    found = [int(node.get(name, 0) // share) for name, share in wanted.items() if share]
    return min(found, default=len(os.sched_getaffinity(0)))


@contextlib.contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """A connection to Ray: the caller's own if there is one, else one that ends here."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"Ray cannot be started or reached: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


# --- who does what ------------------------------------------------------------------------------------------------


def next_task(waiting: Sequence[Task], held: str | None, others: Mapping[str, int]) -> int:
    """Which of the waiting tasks a free worker takes.

    Args:
        waiting: tasks, at least one.
        held: name of the engine that the worker has; None if it has none.
        others: how many other workers hold each engine.

    Returns:
        The index of the first task of the engine held; if there is none, of that with most tasks per worker.
    """
    names = [task.work.engine.name for task in waiting]
    if held in names:
        return names.index(held)
    counts = Counter(names)
    return names.index(max(counts, key=lambda name: counts[name] / (1 + others.get(name, 0))))


@dataclass
class _Member:
    """A worker: its handle, who it says it is, the id of its machine, and the engine that it has."""

    handle: Any
    identity: str = "not started"
    machine: str | None = None
    engine: str | None = None


def _introduced(worker: Worker) -> tuple[str, str]:
    """Who a worker is, and the id of its machine; runs in the worker."""
    return worker.introduced(), require_ray().get_runtime_context().get_node_id()


class _Pool:
    """Workers, what each is doing, and what is still to be done."""

    def __init__(self, ray: Any, hope: _Hope, start: Any, size: int, tasks: Sequence[Task]) -> None:
        self._ray, self._hope, self._new = ray, hope, start
        self._size = size
        self._waiting = list(tasks)
        self._flying: dict[Any, tuple[_Member, Task | None]] = {}
        self._idle: list[_Member] = []
        self._losses: Counter[str] = Counter()
        self._notes: dict[str, list[str]] = {}
        self._failed_starts = 0

    def outcomes(self) -> Iterator[Outcome]:
        """Measures everything; a lost worker is replaced and its task done first."""
        self._staff()
        while self._waiting or self._busy:
            landed, _ = self._ray.wait(list(self._flying), num_returns=1, timeout=LOOK_AFTER)
            for ref in landed:
                yield from self._landed(ref, *self._flying.pop(ref))
            if not landed:
                yield from self._looked_after()
            self._staff()
            yield from self._dispatch()

    @property
    def _busy(self) -> int:
        """How many workers measure a cell."""
        return sum(task is not None for _, task in self._flying.values())

    def _looked_after(self) -> Iterator[Outcome]:
        """Gives up on workers whose machine is gone, from which no answer may ever come.

        Raises:
            EngineError: if nothing is being measured, and no machine is left for a worker to start on.
        """
        alive = _alive(self._ray)
        gone = [ref for ref, (member, _) in self._flying.items() if member.machine not in (None, *alive)]
        for ref in gone:
            member, task = self._flying.pop(ref)
            if task is not None:
                yield from self._lost(member, task, EngineError("its machine left the cluster"))
        self._idle = [member for member in self._idle if member.machine in alive]
        if not self._busy and not self._idle:
            self._hope.check(alive.values(), len(self._waiting))

    def close(self) -> None:
        """Ends all workers."""
        for member in [*self._idle, *(member for member, _ in self._flying.values())]:
            self._end(member)

    def _end(self, member: _Member) -> None:
        self._ray.kill(member.handle)

    def _staff(self) -> None:
        """Starts workers as long as there are fewer than planned, and work for them."""
        while len(self._flying) + len(self._idle) < min(self._size, len(self._waiting) + self._busy):
            member = _Member(self._new())
            self._flying[member.handle.__ray_call__.remote(_introduced)] = member, None

    def _landed(self, ref: Any, member: _Member, task: Task | None) -> Iterator[Outcome]:
        """Takes in what a worker was asked for: who it is, or a finished task."""
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # the worker lives; what it was given does not fit there
            if task is None:
                self._not_started(member, error)
                return
            self._idle.append(member)
            yield Outcome(task.key, None, f"{type(error).__name__}: {error}", worker=member.identity)
            return
        except self._ray.exceptions.RayError as error:
            if task is None:
                self._not_started(member, error)
            else:
                yield from self._lost(member, task, error)
            return
        self._idle.append(member)
        if task is None:
            member.identity, member.machine = value
        else:
            yield self._noted(value)

    def _not_started(self, member: _Member, error: Exception) -> None:
        self._end(member)
        self._failed_starts += 1
        if self._failed_starts >= MAX_LOSSES:
            raise EngineError(
                f"{self._failed_starts} Ray workers could not be started. steerlab must be installed on every machine, "
                f"in the same version. The last said: {_last_line(error)}"
            ) from error

    def _lost(self, member: _Member, task: Task, error: Exception) -> Iterator[Outcome]:
        self._end(member)
        self._losses[task.key] += 1
        if self._losses[task.key] >= MAX_LOSSES:
            text = f"{MAX_LOSSES} workers were lost over this cell, the last ({member.identity}) with: "
            yield Outcome(task.key, None, text + _last_line(error), str(error), member.identity)
            return
        note = f"The worker {member.identity} was lost; its cell was given to another."
        self._notes.setdefault(task.key, []).append(note)
        self._waiting.insert(0, task)

    def _noted(self, outcome: Outcome) -> Outcome:
        notes = tuple(self._notes.pop(outcome.key, ()))
        return Outcome(
            outcome.key, outcome.data, outcome.error, outcome.trace, outcome.worker, (*notes, *outcome.warnings)
        )

    def _dispatch(self) -> Iterator[Outcome]:
        """Gives every idle worker something to do."""
        while self._idle and self._waiting:
            member = self._idle.pop(0)
            others = Counter(other.engine for other in self._members() if other.engine is not None)
            task = self._waiting.pop(next_task(self._waiting, member.engine, others))
            member.engine = task.work.engine.name
            try:
                ref = member.handle.run.remote(task)
            except Exception as error:  # whatever pickling raises over a metric or a plan that a caller wrote
                self._idle.append(member)
                yield Outcome(task.key, None, f"This cell cannot be sent to a worker: {type(error).__name__}: {error}")
                continue
            self._flying[ref] = member, task

    def _members(self) -> list[_Member]:
        return [*self._idle, *(member for member, _ in self._flying.values())]


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
