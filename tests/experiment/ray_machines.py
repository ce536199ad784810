"""A sweep on a Ray cluster whose two machines are lost one after the other, in a process of its own.

The first is killed while it measures a cell, the second once that cell was measured there.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np

from steerlab.core.errors import EngineError
from steerlab.experiment.scaling import Outcome, RayWorkers, SweepCell, SweepCheck, Task, run_sweep
from tests.experiment.ray_sweep import prepare
from tests.experiment.sweep_cells import cell

SEEN = "STEERLAB_TEST_SEEN"
LAYERS, SEEDS = [1, 2], range(4)
# A machine that is gone is noticed within seconds rather than half a minute.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


def slow_margin(positive: np.ndarray, negative: np.ndarray) -> float:
    """The margin, after a while; leaves a file that names the machine."""
    if folder := os.environ.get(SEEN):
        import ray

        Path(folder, ray.get_runtime_context().get_node_id()).touch()
        time.sleep(0.05)
    return float(positive.mean() - negative.mean())


def cells_of(model: str) -> list[SweepCell]:
    """Cells that take about a second each on a worker."""
    return [cell(model, layer, seed, metric=slow_margin) for layer in LAYERS for seed in SEEDS]


def seen(folder: Path) -> str:
    """The machine that was first seen measuring."""
    while not (found := sorted(folder.iterdir())):
        time.sleep(0.02)
    return found[0].name


def noted(
    run: RayWorkers, notes: list[str], then: Callable[[], None]
) -> Callable[[Sequence[Task], SweepCheck], Generator[Outcome, None, None]]:
    """The same measuring, which keeps what was warned of, and does something after the first warning."""

    def measured(tasks: Sequence[Task], check: SweepCheck) -> Generator[Outcome, None, None]:
        for outcome in run(tasks, check):
            yield outcome
            if outcome.warnings and not notes:
                then()
            notes.extend(outcome.warnings)

    return measured


def main(folder: Path, marks: Path, model: str) -> tuple[Sequence[str], str]:
    """Runs the sweep: the notes of the cells that were finished, and the error at the end."""
    prepare(**{SEEN: str(marks)})
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK}
    )
    machines = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(2))}
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def lose(name: str) -> None:
        (raylet,) = machines.pop(name).all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)

    threading.Thread(target=lambda: lose(seen(marks)), daemon=True).start()
    notes: list[str] = []
    run = noted(RayWorkers(workers=2, patience=2.0), notes, lambda: lose(next(iter(machines))))
    error = ""
    try:
        run_sweep(cells_of(model), folder, run=run, check=SweepCheck(run=False))
    except EngineError as failure:
        error = str(failure)
    ray.shutdown()
    cluster.shutdown()
    return notes, error
