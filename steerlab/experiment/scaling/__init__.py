"""Scaling out: many small experiments over a grid, in this process or on Ray workers, with the same rows either way."""

from steerlab.experiment.scaling._cell import EngineRecipe, SweepCell, VectorRecipe, effect_of
from steerlab.experiment.scaling._ray_workers import RayWorkers
from steerlab.experiment.scaling._running import SweepResult, run_locally, run_sweep
from steerlab.experiment.scaling._worker import Outcome, SweepCheck, Task

__all__ = [
    "EngineRecipe",
    "Outcome",
    "RayWorkers",
    "SweepCell",
    "SweepCheck",
    "SweepResult",
    "Task",
    "VectorRecipe",
    "effect_of",
    "run_locally",
    "run_sweep",
]
