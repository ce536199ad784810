"""A sweep on two Ray workers, in a process of its own."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from steerlab.experiment.scaling import RayWorkers, SweepCell, run_sweep
from tests.experiment.sweep_cells import cell, cells


def cells_of(models: Sequence[str]) -> list[SweepCell]:
    """Three layers of every model, and a layer that does not exist."""
    return [*cells(models, [0, 1, 2]), cell(models[0], 9)]


def main(folder: Path, models: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Runs the sweep on a cluster of its own: cells that were measured, and the warnings."""
    prepare(RAY_ADDRESS="local")
    result = run_sweep(cells_of(models), folder, run=RayWorkers(workers=2))
    return result.measured, result.warnings


def prepare(**variables: str) -> None:
    """Sets what the workers take over: one thread, the folder from which these tests are imported, and variables.

    By itself Ray gives its workers what other processes leave of the processor, such as the other tests.
    """
    root = Path(__file__).parents[2]
    os.chdir(root)
    os.environ.update(variables, PYTHONPATH=str(root), OMP_NUM_THREADS="1", RAY_worker_niceness="0")
    torch.set_num_threads(1)
