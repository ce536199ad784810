"""Runs the scenarios of `data_parallel.py` and `sharded.py` in two processes joined by gloo, started once for both."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.sequences import data_parallel, sharded
from tests.sequences.data_parallel import N_PROCESSES


def run(rank: int, path: Path, directory: Path) -> None:
    """Runs every scenario in one of the processes, and saves what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory / 'meeting'}", rank=rank, world_size=N_PROCESSES)
    try:
        found = {
            "data_parallel": {name: scenario(rank, path) for name, scenario in data_parallel.SCENARIOS.items()},
            "sharded": {name: scenario(rank, path, "cpu") for name, scenario in sharded.SCENARIOS.items()},
        }
    finally:
        dist.destroy_process_group()
    torch.save(found, directory / f"rank{rank}.pt")
