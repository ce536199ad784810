"""Runs a sweep in children that are killed at random moments, and tells what each left and what resuming made of it.

`kill_and_resume` runs in a process of its own, which it forks; the model is loaded once, so that the time goes into
sweeps.
"""

import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import steerlab as sl

PAIRS = sl.ContrastPairs.from_lists(
    ["the cat ran home", "a dog sat down", "the bird flew off", "a fish swam by"],
    ["the cat ran away", "a dog stood up", "the bird came back", "a fish swam on"],
    ["x", "x", "y", "y"],
)
TARGETS = sl.Targets.from_records(
    [
        {"prompt": prompt, "target": target, "label": label}
        for prompt in ("the cat", "a dog", "the bird", "a fish")
        for target, label in [(" ran", 1), (" flew off", -1)]
    ]
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # too few draws for a verdict, enough for a test of files
    CONTROLS = sl.Controls(random=4, shuffled=2, wrong_layer=True)
TEXTS = ["the cat ran home and the dog sat down", "a bird flew off"]


def sweep(engine: sl.LensEngine, root: Path) -> sl.Experiment:
    """The same experiment every time."""
    exp = sl.Experiment("sweep", engine, root=root, seed=3)
    vectors = exp.extract(PAIRS, layers=[1])
    exp.effect(
        sl.Plan(sl.add(vectors[1], dose=1.0)),
        TARGETS,
        [-0.2, 0.0, 0.1, 0.2],
        controls=CONTROLS,
        pairs=PAIRS,
        neutral=TEXTS,
        max_ppl_ratio=1e6,
    )
    exp.close()
    return exp


def killed_after(engine: sl.LensEngine, root: Path, cells: int, seconds: float) -> bool:
    """Runs the sweep in a child and kills it so long after so many cells; whether it was still running."""
    child = os.fork()
    if child == 0:
        sweep(engine, root)
        os._exit(0)
    while finished_cells(root) < cells and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def finished_cells(root: Path) -> int:
    """Cells that lie in the run directory."""
    return len(list((root / "sweep" / "cells").rglob("*.parquet")))


def kill_and_resume(model: Path, work: Path, seed: int, kills: int) -> list[dict[str, Any]]:
    """Kills and resumes as often as asked, and says what happened each time."""
    torch.set_num_threads(1)  # those of a pool would be missing in a fork
    engine = sl.load(model, device="cpu")
    sweep(engine, work / "warm")
    started = time.perf_counter()
    whole = sweep(engine, work / "whole")
    duration = time.perf_counter() - started
    rows, total = whole.effects[0].rows, finished_cells(work / "whole")
    moments, found = random.Random(seed), []
    for number in range(kills):
        root = work / f"killed-{number}"
        killed = killed_after(engine, root, moments.randrange(total), moments.uniform(0, duration / total))
        kept = finished_cells(root)
        resumed = sweep(engine, root)
        pd.testing.assert_frame_equal(resumed.effects[0].rows, rows, check_exact=True)
        loaded = sl.Experiment.load(root / "sweep")
        pd.testing.assert_frame_equal(loaded.effects[0].rows, rows, check_exact=True)
        assert resumed.effects[0].summary() == whole.effects[0].summary()
        cells = resumed._session.cells
        found.append(
            {
                "killed": killed,
                "kept": kept,
                "reused": cells.reused,
                "measured": cells.measured,
                "total": total,
                "verified": str(loaded.verify(n=0)),
                "leftovers": len([p for p in root.rglob("*.tmp") if p.is_file()]),
            }
        )
    return found
