"""Sweeps on Ray, with a real cluster of two workers on this machine."""

import contextlib
import importlib.util
import sys
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch

from steerlab.core.errors import BackendMissingError, EngineError, InputError
from steerlab.experiment.scaling import RayWorkers, SweepCheck, Task, run_locally, run_sweep
from steerlab.experiment.scaling._ray_workers import _fitting, _StartTimeout, next_task
from tests.experiment import ray_machines, ray_sweep
from tests.experiment.sweep_cells import cell
from tests.forked import Forked, start_forked
from tests.tiny_models import build_tiny_llama

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


# --- what needs no cluster ----------------------------------------------------------------------------------------


def waiting(*models: str) -> list[Task]:
    made = [cell(f"./{model}", layer) for layer, model in enumerate(models)]
    return [Task(str(k), one.cell({}), one) for k, one in enumerate(made)]


def test_a_worker_keeps_its_engine_as_long_as_there_are_cells_for_it() -> None:
    tasks = waiting("a", "b", "a", "b", "b")
    a, b = (task.work.engine.name for task in tasks[:2])
    assert next_task(tasks, a, {b: 1}) == 0
    assert next_task(tasks, b, {b: 3}) == 1
    assert next_task(tasks[2:], b, {}) == 1


def test_a_free_worker_takes_the_engine_with_most_cells_per_worker() -> None:
    tasks = waiting("a", "b", "a", "b", "b")
    a, b = (task.work.engine.name for task in tasks[:2])
    assert next_task(tasks, None, {}) == 1, "three of b against two of a"
    assert next_task(tasks, None, {b: 1}) == 0, "3 / 2 of b against 2 / 1 of a"
    assert next_task(tasks, "an engine without cells", {a: 1, b: 1}) == 1


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"CPU": 1, "GPU": 2}, 2),
        ({"CPU": 4, "GPU": 1}, 2),
        ({"CPU": 1, "GPU": 0.5}, 8),
        ({"CPU": 16, "GPU": 0}, 0),
        ({"CPU": 1, "GPU": 8}, 0),
    ],
)
def test_how_many_workers_fit_on_a_machine(wanted: dict[str, float], fits: int) -> None:
    assert _fitting({"CPU": 8.0, "GPU": 4.0}, wanted) == fits


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"gpus_per_worker": -1}, {"gpus_per_worker": 1.5}, {"cpus_per_worker": -0.5}], ids=str
)
def test_numbers_that_cannot_be_are_refused(options: dict) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        RayWorkers(**options)


def test_without_ray_one_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendMissingError, match=r"pip install 'steerlab\[ray\]'"):
        list(RayWorkers()([], SweepCheck()))


def test_a_cluster_without_a_fitting_machine_is_waited_for_only_so_long() -> None:
    timeout = _StartTimeout({"GPU": 1, "CPU": 2}, patience=0.2)
    timeout.check([{"CPU": 4.0}], 3)
    time.sleep(0.3)
    timeout.check([{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}], 3)  # one came
    timeout.check([], 3)
    time.sleep(0.3)
    with pytest.raises(EngineError, match=r"asks for \(1 GPU and 2 CPU\), and 3 cells are not measured.*ray start"):
        timeout.check([{"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}], 3)


# --- a cluster ----------------------------------------------------------------------------------------------------


def kill_a_busy_worker(program: Forked, seconds: float = 240) -> int:
    """Kills the first worker of a program that is seen measuring a cell; its process id."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert program.process.is_alive(), program.result()
        for process in psutil.Process(program.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith("ray::Worker.run"):
                    process.kill()
                    return process.pid
        time.sleep(0.05)
    raise AssertionError("no worker was seen at work")


def is_descendant(process: psutil.Process, ancestor: int) -> bool:
    try:
        return ancestor in [parent.pid for parent in process.parents()]
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@needs_ray
def test_workers_give_the_rows_of_one_process_though_one_is_killed_and_a_cell_fails(
    tiny_llama_path: Path, tmp_path: Path
) -> None:
    other = build_tiny_llama(tmp_path / "other", seed=1)
    models = [str(tiny_llama_path), str(other)]
    program = start_forked(ray_sweep.main, tmp_path / "ray", models)
    try:
        killed = kill_a_busy_worker(program)
        measured, said = program.result(300)
    finally:
        program.process.kill()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    try:
        alone = run_sweep(ray_sweep.cells_of(models), tmp_path / "alone", run=run_locally)
    finally:
        torch.set_num_threads(threads)
    assert measured == alone.measured == 6
    assert [text for text in said if f":{killed} was lost" in text], said
    summaries = [pd.read_parquet(tmp_path / name / "summary.parquet") for name in ("ray", "alone")]
    pd.testing.assert_frame_equal(*summaries, rtol=1e-5, atol=1e-6)
    assert Counter(summaries[0].status) == {"done": 6, "failed": 1}
    assert summaries[0].error[6].startswith("HookPointError: Layer 9")
    rows = [pd.read_parquet(tmp_path / name / "sweep.parquet") for name in ("ray", "alone")]
    pd.testing.assert_frame_equal(*rows, rtol=1e-5, atol=1e-6)
    left = [p for p in psutil.process_iter(["cmdline"]) if is_descendant(p, program.process.pid)]
    assert left == []


@pytest.mark.slow
@needs_ray
def test_a_lost_machine_costs_its_cell_a_second_try_and_the_last_one_ends_the_sweep_with_one_error(
    tiny_llama_path: Path, tmp_path: Path
) -> None:
    marks = tmp_path / "seen"
    marks.mkdir()
    model = str(tiny_llama_path)
    notes, error = start_forked(ray_machines.main, tmp_path / "sweep", marks, model).result(300)
    assert any("was lost; its cell was given to another" in note for note in notes), notes
    assert error.startswith("The Ray cluster has lost its machines"), error
    assert "run the sweep again" in error
    kept = {path.stem for path in (tmp_path / "sweep").rglob("cells/sweep/*.parquet")}
    result = run_sweep(ray_machines.cells_of(model), tmp_path / "sweep", check=SweepCheck(run=False))
    assert result.reused == len(kept) >= 1, "finished cells are kept, and not measured again"
    assert result.reused + result.measured == len(result.summary) == 8
    assert str(8 - len(kept)) + " cells are not measured" in error
