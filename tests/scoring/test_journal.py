import os

import numpy as np
import pytest

from steerlab.core.errors import RunError
from steerlab.scoring._journal import Journal, Record, TextDigest
from steerlab.scoring.windows import stream_windows
from tests.forked import run_forked
from tests.scoring.other_processes import open_journal

WHAT = {"text": "abc", "stride": 4}


def record(first, n):
    return Record(first, first + n, bytes([first] * 32), np.linspace(0, 1, n, dtype=np.float32))


def filled(path, n_records=3):
    with Journal(path, WHAT) as journal:
        for k in range(n_records):
            journal.append(record(5 * k, 5))
    return path


def same(found, wanted):
    return [(r.first_scored, r.stop, r.digest, r.nlls.tolist()) for r in found] == [
        (r.first_scored, r.stop, r.digest, r.nlls.tolist()) for r in wanted
    ]


def test_records_come_back_in_order(tmp_path):
    path = filled(tmp_path / "run.journal")
    with Journal(path, WHAT) as journal:
        assert same(journal.records, [record(0, 5), record(5, 5), record(10, 5)])
        journal.append(record(15, 2))
    with Journal(path, WHAT) as journal:
        assert same(journal.records[3:], [record(15, 2)])


def test_a_folder_gets_a_file(tmp_path):
    filled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["nlls.journal"]


@pytest.mark.parametrize("cut", range(1, 77))
def test_a_record_that_is_not_whole_is_dropped(tmp_path, cut):
    path = filled(tmp_path / "run.journal", 2)
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with Journal(path, WHAT) as journal:
        assert same(journal.records, [record(0, 5)])
        journal.append(record(5, 5))
    assert path.stat().st_size == size
    with Journal(path, WHAT) as journal:
        assert same(journal.records, [record(0, 5), record(5, 5)])


def test_damaged_bytes_are_dropped_with_all_after_them(tmp_path):
    path = filled(tmp_path / "run.journal", 3)
    data = bytearray(path.read_bytes())
    data[len(data) - 76 - 30] ^= 1
    path.write_bytes(bytes(data))
    with Journal(path, WHAT) as journal:
        assert same(journal.records, [record(0, 5)])


def test_something_else_is_refused_with_what_differs(tmp_path):
    path = filled(tmp_path / "run.journal")
    with pytest.raises(RunError, match="stride was 4, now 2; text was 'abc', now 'xyz'"):
        Journal(path, {"text": "xyz", "stride": 2})
    other = tmp_path / "notes.txt"
    other.write_text("notes\n")
    with pytest.raises(RunError, match="not a journal"):
        Journal(other, WHAT)
    assert other.read_text() == "notes\n"


def test_two_processes_cannot_write_one_journal(tmp_path):
    path = filled(tmp_path / "run.journal")
    with Journal(path, WHAT), pytest.raises(AssertionError, match="in use by another process"):
        run_forked(open_journal, path, WHAT)
    run_forked(open_journal, path, WHAT)


def test_the_digest_is_of_the_text_whatever_the_windows():
    ids = list(range(7, 100))

    def digest(context, stride):
        found = TextDigest()
        for window in stream_windows([ids], context, stride):
            found.add(window)
        return found.digest()

    assert digest(10, 3) == digest(24, 24) == digest(93, 1)
    ids[50] += 1
    changed = digest(10, 3)
    ids[50] -= 1
    assert changed != digest(10, 3)


def test_half_written_files_of_a_killed_run_are_removed(tmp_path):
    path = tmp_path / "run[1].journal"
    for name in (".run[1].journal.x.tmp", ".other.txt.x.tmp"):
        (tmp_path / name).write_bytes(b"tw")
    with Journal(path, WHAT):
        assert [found.name for found in tmp_path.glob("*.tmp")] == [".other.txt.x.tmp"]
