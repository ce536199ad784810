"""A sweep on two Ray workers: `ray_sweep.py FOLDER MODEL...`; prints what it came to as JSON."""

import json
import sys
from collections.abc import Sequence

from steerlab.experiment.scaling import RayWorkers, SweepCell, run_sweep
from tests.experiment.sweep_cells import cell, cells


def cells_of(models: Sequence[str]) -> list[SweepCell]:
    """Three layers of every model, and a layer that does not exist."""
    return [*cells(models, [0, 1, 2]), cell(models[0], 9)]


def main(folder: str, *models: str) -> None:
    """Runs the sweep."""
    result = run_sweep(cells_of(models), folder, run=RayWorkers(workers=2))
    sys.stdout.write(json.dumps({"measured": result.measured, "warnings": result.warnings}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
