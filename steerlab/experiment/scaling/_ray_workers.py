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
from steerlab.experiment.scaling._worker import Outcome, SweepCheck, Task, Worker

MAX_LOSSES: Final = 3
"""How many workers a cell may take down with it, and how many may fail to start, before it is given up."""
CHECK_SECONDS: Final = 5.0
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
            timeout = _StartTimeout({"GPU": gpus, "CPU": self.cpus_per_worker}, self.patience)
            pool = _Pool(ray, timeout, lambda: remote.remote(check, torch.get_num_threads()), size, tasks)
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


class _StartTimeout:
    """How long a sweep waits while no machine of the cluster can run a worker.

    Args:
        wanted: what a worker asks for, by resource.
        patience: seconds.
    """

    def __init__(self, wanted: Mapping[str, float], patience: float) -> None:
        self._wanted, self._patience = wanted, patience
        self._lost_since: float | None = None

    def check(self, machines: Iterable[Mapping[str, float]], left: int) -> None:
        """Checks that a worker fits on a machine, or that the wait for one is not over.

        Args:
            machines: resources of those that are alive.
            left: cells that are not measured yet.

        Raises:
            EngineError: if there was none for longer than the patience.
        """
        if any(_fitting(resources, self._wanted) for resources in machines):
            self._lost_since = None
            return
        now = time.monotonic()
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since >= self._patience:
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
class _RayWorker:
    """A worker: its handle, host and process, the id of its machine, and the name of the engine that it holds."""

    handle: Any
    identity: str = "not started"
    machine: str | None = None
    engine: str | None = None


def _identify(worker: Worker) -> tuple[str, str]:
    """A worker's host and process, and the id of its machine; runs in the worker."""
    return worker.identity(), require_ray().get_runtime_context().get_node_id()


class _Pool:
    """Workers, what each is doing, and what is still to be done."""

    def __init__(self, ray: Any, timeout: _StartTimeout, start: Any, size: int, tasks: Sequence[Task]) -> None:
        self._ray, self._timeout, self._start = ray, timeout, start
        self._size = size
        self._waiting = list(tasks)
        self._running: dict[Any, tuple[_RayWorker, Task | None]] = {}
        self._idle: list[_RayWorker] = []
        self._losses: Counter[str] = Counter()
        self._notes: dict[str, list[str]] = {}
        self._failed_starts = 0

    def outcomes(self) -> Iterator[Outcome]:
        """Measures everything; a lost worker is replaced and its task done first."""
        self._start_workers()
        while self._waiting or self._busy:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=CHECK_SECONDS)
            for ref in ready:
                yield from self._receive(ref, *self._running.pop(ref))
            if not ready:
                yield from self._check_machines()
            self._start_workers()
            yield from self._dispatch()

    @property
    def _busy(self) -> int:
        """How many workers measure a cell."""
        return sum(task is not None for _, task in self._running.values())

    def _check_machines(self) -> Iterator[Outcome]:
        """Gives up on workers whose machine is gone, from which no answer may ever come.

        Raises:
            EngineError: if nothing is being measured, and no machine is left for a worker to start on.
        """
        alive = _alive(self._ray)
        gone = [ref for ref, (worker, _) in self._running.items() if worker.machine not in (None, *alive)]
        for ref in gone:
            worker, task = self._running.pop(ref)
            if task is not None:
                yield from self._lost(worker, task, EngineError("its machine left the cluster"))
        self._idle = [worker for worker in self._idle if worker.machine in alive]
        if not self._busy and not self._idle:
            self._timeout.check(alive.values(), len(self._waiting))

    def close(self) -> None:
        """Ends all workers."""
        for worker in [*self._idle, *(worker for worker, _ in self._running.values())]:
            self._end(worker)

    def _end(self, worker: _RayWorker) -> None:
        self._ray.kill(worker.handle)

    def _start_workers(self) -> None:
        """Starts workers as long as there are fewer than planned, and work for them."""
        while len(self._running) + len(self._idle) < min(self._size, len(self._waiting) + self._busy):
            worker = _RayWorker(self._start())
            self._running[worker.handle.__ray_call__.remote(_identify)] = worker, None

    def _receive(self, ref: Any, worker: _RayWorker, task: Task | None) -> Iterator[Outcome]:
        """Receives an answer of a worker: its identity after its start, or a finished task."""
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # the worker lives; what it was given does not fit there
            if task is None:
                self._not_started(worker, error)
                return
            self._idle.append(worker)
            yield Outcome(task.key, None, f"{type(error).__name__}: {error}", worker=worker.identity)
            return
        except self._ray.exceptions.RayError as error:
            if task is None:
                self._not_started(worker, error)
            else:
                yield from self._lost(worker, task, error)
            return
        self._idle.append(worker)
        if task is None:
            worker.identity, worker.machine = value
        else:
            yield self._noted(value)

    def _not_started(self, worker: _RayWorker, error: Exception) -> None:
        self._end(worker)
        self._failed_starts += 1
        if self._failed_starts >= MAX_LOSSES:
            raise EngineError(
                f"{self._failed_starts} Ray workers could not be started. steerlab must be installed on every machine, "
                f"in the same version. The last said: {_last_line(error)}"
            ) from error

    def _lost(self, worker: _RayWorker, task: Task, error: Exception) -> Iterator[Outcome]:
        self._end(worker)
        self._losses[task.key] += 1
        if self._losses[task.key] >= MAX_LOSSES:
            text = f"{MAX_LOSSES} workers were lost over this cell, the last ({worker.identity}) with: "
            yield Outcome(task.key, None, text + _last_line(error), str(error), worker.identity)
            return
        note = f"The worker {worker.identity} was lost; its cell was given to another."
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
            worker = self._idle.pop(0)
            others = Counter(other.engine for other in self._workers() if other.engine is not None)
            task = self._waiting.pop(next_task(self._waiting, worker.engine, others))
            worker.engine = task.work.engine.name
            try:
                ref = worker.handle.run.remote(task)
            except Exception as error:  # whatever pickling raises over a metric or a plan that a caller wrote
                self._idle.append(worker)
                yield Outcome(task.key, None, f"This cell cannot be sent to a worker: {type(error).__name__}: {error}")
                continue
            self._running[ref] = worker, task

    def _workers(self) -> list[_RayWorker]:
        return [*self._idle, *(worker for worker, _ in self._running.values())]


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
