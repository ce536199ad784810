import os
import stat

import pytest

from steerlab.core._files import write_atomic
from steerlab.core.errors import InputError


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
