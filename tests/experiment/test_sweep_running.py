import json
import os
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import steerlab as sl
from steerlab.core.errors import EngineError, InputError, RunError
from steerlab.experiment.scaling import Outcome, SweepCheck, Task, run_locally, run_sweep
from steerlab.experiment.scaling._running import in_engine_order
from steerlab.experiment.scaling._worker import Worker
from tests.experiment.sweep_cells import added, cell, cells
from tests.tiny_models import build_tiny_llama

NO_CHECK = SweepCheck(run=False)
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}  # what is measured twice with several threads may differ in its last bits


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny") / "other", seed=1)


@pytest.fixture(scope="module")
def whole(tiny_llama_path: Path, other_path: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Rows of an undisturbed sweep."""
    result = run_sweep(cells([tiny_llama_path, other_path]), tmp_path_factory.mktemp("whole") / "s", check=NO_CHECK)
    assert result.rows is not None
    return result.rows


class Stopped(Exception):
    """Stands for whatever ends a process in the middle of a sweep."""


def stopping_after(number: int):
    """Measures so many cells, and is then cut off."""

    def run(tasks: Sequence[Task], check: SweepCheck) -> Generator[Outcome, None, None]:
        for count, outcome in enumerate(run_locally(tasks, check)):
            if count == number:
                raise Stopped
            yield outcome

    return run


def cell_files(folder: Path) -> dict[str, int]:
    """Finished cells, with when each was written."""
    return {path.stem: path.stat().st_mtime_ns for path in sorted((folder / "cells" / "sweep").glob("*.parquet"))}


def test_rows_come_in_the_order_of_the_cells(whole: pd.DataFrame) -> None:
    assert list(whole.columns[:4]) == ["cell", "model", "seed", "layer"]
    told = whole[["cell", "model", "layer"]].drop_duplicates().to_numpy().tolist()
    assert told == [[0, "llama", 1], [1, "llama", 2], [2, "other", 1], [3, "other", 2]]
    assert isinstance(whole.index, pd.RangeIndex)
    assert whole.groupby("model").model_hash.nunique().tolist() == [1, 1]
    one = whole[(whole.cell == 0) & (whole.family == "vector")]
    assert one[["dose", "item"]].to_numpy().tolist() == [[d, k] for d in (-0.1, 0.0, 0.1) for k in range(4)]


def test_a_sweep_cut_off_goes_on_where_it_stopped(
    tiny_llama_path: Path, other_path: Path, whole: pd.DataFrame, tmp_path: Path
) -> None:
    wanted = cells([tiny_llama_path, other_path])
    with pytest.raises(Stopped):
        run_sweep(wanted, tmp_path / "s", run=stopping_after(2), check=NO_CHECK)
    before = cell_files(tmp_path / "s")
    assert len(before) == 2
    assert not (tmp_path / "s" / "sweep.parquet").exists()
    result = run_sweep(wanted, tmp_path / "s", check=NO_CHECK)
    assert (result.reused, result.measured) == (2, 2)
    assert {key: cell_files(tmp_path / "s")[key] for key in before} == before
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "s" / "sweep.parquet"), whole, **CLOSE)
    again = run_sweep(wanted, tmp_path / "s", run=stopping_after(0), check=NO_CHECK)
    assert (again.reused, again.measured) == (4, 0)
    assert again.rows is not None
    pd.testing.assert_frame_equal(again.rows, whole, **CLOSE)


def test_a_sweep_that_grows_measures_what_is_new(tiny_llama_path: Path, tmp_path: Path) -> None:
    first = run_sweep(cells([tiny_llama_path], [2]), tmp_path / "s", check=NO_CHECK)
    grown = run_sweep(cells([tiny_llama_path], [1, 2]), tmp_path / "s", check=NO_CHECK)
    assert (grown.reused, grown.measured) == (1, 1)
    assert first.rows is not None
    assert grown.rows is not None
    second = grown.rows[grown.rows.cell == 1].reset_index(drop=True)
    pd.testing.assert_frame_equal(second.assign(cell=0), first.rows, **CLOSE)
    shrunk = run_sweep(cells([tiny_llama_path], [1]), tmp_path / "s", check=NO_CHECK)
    assert shrunk.rows is not None
    assert set(shrunk.rows.layer) == {1}


def test_overwrite_starts_anew(tiny_llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "notes.txt").write_text("mine")
    run_sweep(cells([tiny_llama_path], [1, 2]), tmp_path / "s", check=NO_CHECK)
    result = run_sweep(cells([tiny_llama_path], [1]), tmp_path / "s", check=NO_CHECK, overwrite=True)
    assert (result.reused, result.measured) == (0, 1)
    assert len(cell_files(tmp_path / "s")) == 1
    assert (tmp_path / "s" / "notes.txt").read_text() == "mine"


def test_a_cell_that_fails_is_recorded_and_the_others_go_on(
    tiny_llama_path: Path, whole: pd.DataFrame, tmp_path: Path
) -> None:
    wanted = [cell(tiny_llama_path, 1), cell(tiny_llama_path, 9), cell("./no-such-model"), cell(tiny_llama_path, 2)]
    result = run_sweep(wanted, tmp_path / "s", check=NO_CHECK)
    assert result.summary.status.tolist() == ["done", "failed", "failed", "done"]
    assert result.failed.error.str.split(":").str[0].tolist() == ["HookPointError", "ModelNotFoundError"]
    assert "2 failed" in str(result)
    assert result.rows is not None
    assert sorted(set(result.rows.cell)) == [0, 3]
    pd.testing.assert_series_equal(result.rows.value, whole.value[whole.model == "llama"], **CLOSE)
    recorded = json.loads((tmp_path / "s" / "errors" / f"{result.summary.key[1]}.json").read_text())
    assert recorded["error"] == result.summary.error[1]
    assert "Traceback" in recorded["traceback"]
    kept = pd.read_parquet(tmp_path / "s" / "summary.parquet")
    assert kept.error.tolist() == result.summary.error.tolist()


def test_a_cell_that_failed_is_tried_again(tmp_path: Path) -> None:
    model = tmp_path / "late"
    wanted = [cell(model, 1)]
    assert len(run_sweep(wanted, tmp_path / "s", check=NO_CHECK).failed) == 1
    assert not (tmp_path / "s" / "sweep.parquet").exists()
    build_tiny_llama(model)
    result = run_sweep(wanted, tmp_path / "s", check=NO_CHECK)
    assert result.summary.status.tolist() == ["done"]
    assert list((tmp_path / "s" / "errors").glob(f"{result.summary.key[0]}.json")) == []


def test_an_engine_is_loaded_once_for_all_its_cells(
    tiny_llama_path: Path, other_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steerlab.experiment.scaling import _worker as worker

    started, start = [], worker._start
    monkeypatch.setattr(worker, "_start", lambda recipe, check: started.append(recipe.model) or start(recipe, check))
    mixed = [cell(path, layer) for layer in (1, 2) for path in (tiny_llama_path, other_path)]
    result = run_sweep(mixed, tmp_path / "s", check=NO_CHECK)
    assert started == [str(tiny_llama_path), str(other_path)]
    assert result.summary.model.tolist() == ["llama", "other"] * 2


def test_an_engine_that_cannot_start_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steerlab.experiment.scaling import _worker as worker

    started, start = [], worker._start
    monkeypatch.setattr(worker, "_start", lambda recipe, check: started.append(recipe.model) or start(recipe, check))
    result = run_sweep(cells(["./no-such-model"]), tmp_path / "s", check=NO_CHECK)
    assert started == ["./no-such-model"]
    assert len(result.failed) == 2


def test_an_engine_that_died_is_started_anew_for_the_next_cell(tiny_llama_path: Path) -> None:
    def dying(vector: sl.SteeringVector) -> sl.Plan:
        if os.environ.get("STEERLAB_TEST_DYING"):
            raise EngineError("its process has died")
        return added(vector)

    worker, one = Worker(NO_CHECK), cell(tiny_llama_path, make=dying)
    task = Task("a", one.cell(one.engine.what()), one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEERLAB_TEST_DYING", "1")
        assert worker.run(task).error == "EngineError: its process has died"
    assert worker._owner is None
    assert worker.run(task).error == ""
    worker.close()


def test_the_selfcheck_runs_once_per_engine_and_its_failure_stops_the_cells(
    tiny_llama_path: Path, tmp_path: Path
) -> None:
    strict = SweepCheck(tolerance=1e-30)
    result = run_sweep(cells([tiny_llama_path]), tmp_path / "s", check=strict)
    assert len(result.failed) == 2
    assert result.failed.error.str.contains("The selfcheck of LensEngine").all()
    allowed = run_sweep(cells([tiny_llama_path]), tmp_path / "s", check=SweepCheck(tolerance=1e-30, allow_failure=True))
    assert len(allowed.failed) == 0


def test_two_settings_of_one_measurement_are_measured_once(tiny_llama_path: Path, tmp_path: Path) -> None:
    twins = [cell(tiny_llama_path, settings={"name": name}) for name in "ab"]
    result = run_sweep(twins, tmp_path / "s", check=NO_CHECK)
    assert (result.measured, len(cell_files(tmp_path / "s"))) == (1, 1)
    assert result.rows is not None
    assert result.rows.name.drop_duplicates().tolist() == ["a", "b"]
    first, second = (result.rows[result.rows.cell == k].value.tolist() for k in (0, 1))
    assert first == second


def test_ranks_are_adjusted_for_every_cell_of_the_same_items(tiny_llama_path: Path, tmp_path: Path) -> None:
    wanted = [cell(tiny_llama_path, layer, controls=sl.Controls(random=19)) for layer in (0, 1, 2)]
    summary = run_sweep(wanted, tmp_path / "s", check=NO_CHECK).summary
    from steerlab.measures.intervals import holm

    assert summary.adjusted_rank.tolist() == holm(summary.null_rank.tolist())
    assert (summary.adjusted_rank >= summary.null_rank).all()
    assert (summary.low <= summary.slope).all()
    assert (summary.slope <= summary.high).all()


def test_warnings_are_told_once(tiny_llama_path: Path, tmp_path: Path) -> None:
    def idle(vector: sl.SteeringVector) -> sl.Plan:
        return sl.Plan(sl.add(vector, dose=1.0, where=sl.where.after(1)))  # a token that no text holds

    twice = [cell(tiny_llama_path, make=idle, doses=doses) for doses in ((0, 0.1), (0, 0.2))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run_sweep(twice, tmp_path / "s", check=NO_CHECK)
    assert any("selects no token" in text for text in result.warnings)
    assert len(set(result.warnings)) == len(result.warnings)


def test_tasks_of_one_engine_stay_together(tiny_llama_path: Path, other_path: Path) -> None:
    mixed = [cell(path, layer) for layer in (1, 2) for path in (other_path, tiny_llama_path)]
    tasks = [Task(str(k), one.cell({}), one) for k, one in enumerate(mixed)]
    assert [task.key for task in in_engine_order(tasks)] == ["0", "2", "1", "3"]


def test_folders_of_others_are_refused(tiny_llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunError, match="holds the run of an experiment"):
        run_sweep(cells([tiny_llama_path]), tmp_path / "run", check=NO_CHECK)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be made"):
        run_sweep(cells([tiny_llama_path]), tmp_path / "file", check=NO_CHECK)
    with pytest.raises(InputError, match="no cells"):
        run_sweep([], tmp_path / "s")
    with pytest.raises(InputError, match="same settings"):
        run_sweep([cell(tiny_llama_path), cell(tiny_llama_path, settings={"a": 1})], tmp_path / "s")


def test_a_damaged_cell_is_an_error_that_names_it(tiny_llama_path: Path, tmp_path: Path) -> None:
    run_sweep(cells([tiny_llama_path], [1, 2]), tmp_path / "s", check=NO_CHECK)
    first, second = sorted((tmp_path / "s" / "cells" / "sweep").glob("*.parquet"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-20])
    with pytest.raises(RunError, match=first.name):
        run_sweep(cells([tiny_llama_path], [1, 2]), tmp_path / "s", check=NO_CHECK)
    first.write_bytes(second.read_bytes())
    with pytest.raises(RunError, match="another cell than its name says"):
        run_sweep(cells([tiny_llama_path], [1, 2]), tmp_path / "s", check=NO_CHECK)
