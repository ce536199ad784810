import hashlib
from pathlib import Path

import pytest

from steerlab.experiment._store.run_folder import MANIFEST_FILE, RunFolder
from steerlab.experiment.scaling._folder import SweepFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_every_file_is_entered_with_its_hash(folder: RunFolder) -> None:
    folder.write("cells/a.parquet", b"one")
    folder.write("run.json", "{}")
    folder.write("run.json", '{"format": 2}')
    wanted = {"cells/a.parquet": b"one", "run.json": b'{"format": 2}'}
    assert folder.manifest() == {name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()}


def test_a_torn_last_line_loses_nothing_else(folder: RunFolder) -> None:
    folder.write("cells/a.parquet", b"one")
    folder.write("cells/b.parquet", b"two")
    manifest = folder.path / MANIFEST_FILE
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert list(folder.manifest()) == ["cells/a.parquet"]
    folder.repair()
    folder.write("cells/c.parquet", b"three")
    assert sorted(folder.manifest()) == ["cells/a.parquet", "cells/b.parquet", "cells/c.parquet"]


def test_mending_does_not_enter_what_was_changed_afterwards(folder: RunFolder) -> None:
    path = folder.write("cells/a.parquet", b"one")
    path.write_bytes(b"tampered")
    folder.repair()
    assert folder.manifest()["cells/a.parquet"] == hashlib.sha256(b"one").hexdigest()


def test_mending_removes_half_written_files(folder: RunFolder) -> None:
    folder.write("cells/scores/a.parquet", b"one")
    (folder.path / "cells" / "scores" / ".b.parquet.x1.tmp").write_bytes(b"tw")
    folder.repair()
    assert [path.name for path in (folder.path / "cells" / "scores").iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("name", ["run.json", "report.html", ".lock.json"])
def test_mending_removes_half_written_files_of_the_folder_itself(folder: RunFolder, name: str) -> None:
    (folder.path / f".{name}.a1b2c3d4.tmp").write_bytes(b"tw")
    (folder.path / ".notes.txt.a1b2c3d4.tmp").write_bytes(b"somebody else's")
    folder.repair()
    assert [path.name for path in folder.path.iterdir()] == [".notes.txt.a1b2c3d4.tmp"]


def test_a_sweep_removes_half_written_files(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    for place in (".sweep.json.x.tmp", ".sweep.parquet.x.tmp", ".summary.parquet.x.tmp", "errors/.k.json.x.tmp"):
        (tmp_path / place).write_bytes(b"tw")
    SweepFolder(tmp_path).close()
    assert not list(tmp_path.rglob("*.tmp"))


def test_clearing_leaves_what_is_not_ours(folder: RunFolder) -> None:
    folder.write("cells/a.parquet", b"one")
    folder.write("run.json", "{}")
    (folder.path / "notes.txt").write_text("mine")
    folder.clear()
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]
