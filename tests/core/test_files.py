import os
import stat
from pathlib import Path

import pytest

import steerlab as sl
from steerlab.core._files import warn_of_file_name, write_atomic
from steerlab.core._warning import SteerlabWarning
from steerlab.core.errors import InputError
from steerlab.engines.toy import ToyEngine
from steerlab.experiment.measurements.texts import neutral_texts


def test_writes_text_and_bytes_and_makes_the_folder(tmp_path):
    assert write_atomic(tmp_path / "new" / "a.txt", "grün").read_bytes() == "grün".encode()
    assert write_atomic(tmp_path / "b.bin", b"\x00\xff").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = write_atomic(tmp_path / "a.txt", "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(InputError, match="disk full"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = write_atomic(tmp_path / "a.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["here.txt", "folder/here.txt"])
def test_the_name_of_a_file_as_a_text(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    Path(name).write_text("What it holds.")
    with pytest.warns(SteerlabWarning, match=f"'{name}' is taken as a text, .* give a path, Path\\('{name}'\\)"):
        warn_of_file_name(name, "a path, Path({name})")


@pytest.mark.parametrize("text", ["gone.txt", "folder", "", "a\0b", "two\nlines", "long " * 2000, ["here.txt"], None])
def test_other_texts_are_no_names_of_files(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    warn_of_file_name(text, "nothing")


def test_texts_that_are_scored_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("The bridge was closed.")
    engine = ToyEngine()
    with pytest.warns(SteerlabWarning, match="is also the name of a file"):
        named = sl.perplexity(engine, "notes.txt")
    assert named.num_tokens < sl.perplexity(engine, Path("notes.txt")).num_tokens
    with pytest.warns(SteerlabWarning, match="give its paragraphs"):
        assert neutral_texts("notes.txt") == ["notes.txt"]
