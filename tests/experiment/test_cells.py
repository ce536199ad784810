import io
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from steerlab.core.errors import RunError
from steerlab.experiment._store.cells import Cell, Cells, ResumeNotice
from steerlab.experiment._store.run_folder import RunFolder

FRAME = pd.DataFrame(
    {"item": [0, 1], "log_prob": [-1.5, float("nan")], "ids": [[1, 2], []], "boundary": ["clean", "m"]}
)
CELL = Cell("scores", {"plan": "p", "data": "d"}, {"scale": 0.1})


@pytest.fixture(params=["disk", "memory"])
def cells(request: pytest.FixtureRequest, tmp_path: Path) -> Cells:
    return Cells(RunFolder(tmp_path) if request.param == "disk" else None)


def test_a_cell_is_found_as_it_was_added(cells: Cells) -> None:
    assert cells.find(CELL, "e") is None
    added = cells.add(CELL, "e", FRAME)
    found = cells.find(CELL, "e")
    assert found is not None
    pd.testing.assert_frame_equal(found, added)
    assert found.log_prob[0] == -1.5
    assert found.log_prob.isna().tolist() == [False, True]
    assert [list(ids) for ids in found.ids] == [[1, 2], []]
    assert isinstance(found.index, pd.RangeIndex)
    assert (cells.measured, cells.reused) == (1, 1)


@pytest.mark.parametrize(
    ("other", "engine"),
    [
        (Cell("nlls", CELL.what), "e"),
        (Cell("scores", {"plan": "q", "data": "d"}), "e"),
        (Cell("scores", {"plan": "p", "data": "d", "chat": True}), "e"),
        (CELL, "another engine"),
    ],
)
def test_whatever_determines_a_cell_tells_it_apart(cells: Cells, other: Cell, engine: str) -> None:
    cells.add(CELL, "e", FRAME)
    assert cells.find(other, engine) is None


def test_what_only_helps_to_repeat_a_cell_does_not() -> None:
    assert Cell("scores", CELL.what, {"scale": 9}).key("e") == CELL.key("e")


def test_get_measures_once(cells: Cells) -> None:
    calls = []
    for _ in range(3):
        cells.get(CELL, "e", lambda: calls.append(1) or FRAME)
    assert len(calls) == 1
    assert len(cells.stored()) == 1


def test_a_cell_says_what_it_is(cells: Cells) -> None:
    cells.add(CELL, "e", FRAME)
    (place,) = cells.stored()
    stored = cells.read(place)
    assert (stored.cell, stored.engine_hash) == (CELL, "e")
    assert place == f"cells/scores/{stored.key}.parquet"


def test_a_damaged_or_exchanged_file_is_refused(tmp_path: Path) -> None:
    cells = Cells(RunFolder(tmp_path))
    cells.add(CELL, "e", FRAME)
    other = Cell("scores", {"plan": "q", "data": "d"})
    cells.add(other, "e", FRAME.assign(item=7))
    places = {cell.key("e"): tmp_path / f"cells/scores/{cell.key('e')}.parquet" for cell in (CELL, other)}
    places[CELL.key("e")].write_bytes(places[other.key("e")].read_bytes())
    with pytest.raises(RunError, match="another cell"):
        cells.find(CELL, "e")
    places[CELL.key("e")].write_bytes(b"PAR1 and no more")
    with pytest.raises(RunError, match="delete it to measure it again"):
        cells.find(CELL, "e")


def test_frames_on_disk_are_plain_parquet(tmp_path: Path) -> None:
    cells = Cells(RunFolder(tmp_path))
    added = cells.add(CELL, "e", FRAME)
    (path,) = tmp_path.rglob("*.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(path), added)
    table = pq.read_table(io.BytesIO(path.read_bytes()))
    assert table.column_names == list(FRAME.columns), "no index column"


def test_cells_that_a_run_shares_are_no_news(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("select", "effect"):
        with ResumeNotice(cells, name):
            cells.get(CELL, "e", lambda: FRAME)
    assert cells.reused == 1
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_tells_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Cells(RunFolder(tmp_path)).add(CELL, "e", FRAME)
    cells = Cells(RunFolder(tmp_path))
    with ResumeNotice(cells, "cost"):
        cells.get(Cell("scores", {"plan": "q"}), "e", lambda: FRAME)
    assert capsys.readouterr().err == ""
    with ResumeNotice(cells, "effect"):
        cells.get(CELL, "e", lambda: FRAME)
        cells.get(Cell("scores", {"plan": "q"}), "e", lambda: FRAME)
    with ResumeNotice(cells, "entropy"):
        cells.get(CELL, "e", lambda: FRAME)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("info: effect: 1 of 2 cells were there already")
