import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import steerlab as sl
from steerlab.core.errors import RunError
from steerlab.experiment._store.locking import HOLDER_FILE, RunLock
from tests.forked import CONTEXT


def hold(folder: Path, pipe: Connection) -> None:
    """Holds a directory's lock until it is told to release it."""
    lock = RunLock(folder)
    pipe.send("held")
    pipe.recv()
    lock.release()
    pipe.send("released")
    pipe.recv()


@contextmanager
def other_process(target, folder: Path) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that runs a function of the folder and of a pipe whose other end is this process's."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(folder, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


@contextmanager
def holder(folder: Path) -> Iterator[tuple[BaseProcess, Connection]]:
    """Another process that holds a directory's lock."""
    with other_process(hold, folder) as (process, pipe):
        assert pipe.recv() == "held"
        yield process, pipe


def test_another_process_is_refused_and_named(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, pipe):
        with pytest.raises(RunError, match=rf"pid {process.pid} on {os.uname().nodename}, since 2\d\d\d-"):
            RunLock(tmp_path)
        pipe.send("release")
        assert pipe.recv() == "released"
        RunLock(tmp_path).release()


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # root, as which tests often run, may write anywhere

    monkeypatch.setattr("steerlab.experiment._store.locking.FileLock.acquire", refuse)
    with pytest.raises(RunError, match="may not be written by this user"):
        RunLock(tmp_path)


def test_a_killed_process_does_not_block(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        process.kill()
        process.join()
        assert (tmp_path / HOLDER_FILE).exists(), "it could not tidy up"
        lock = RunLock(tmp_path)
        assert str(os.getpid()) in (tmp_path / HOLDER_FILE).read_text()
        lock.release()


def test_a_run_that_another_process_writes_can_be_read_and_not_measured(
    tmp_path: Path, tiny_llama_engine: sl.LensEngine
) -> None:
    first = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    first.cost(sl.Plan(), ["the cat ran home"])
    first.close()
    with holder(first.path) as (process, _):
        second = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
        assert len(second.results.costs) == 1
        with pytest.raises(RunError, match=f"pid {process.pid}"):
            second.cost(sl.Plan(), ["another text to score"])
        assert second.verify(n=1).ok
    second.cost(sl.Plan(), ["another text to score"])
    assert len(second.results.costs) == 2


def test_experiments_of_one_process_share_a_run(tmp_path: Path, tiny_llama_engine: sl.LensEngine) -> None:
    one = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    one.cost(sl.Plan(), ["the cat ran home"])
    two = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    two.cost(sl.Plan(), ["another text to score"])
    one.cost(sl.Plan(), ["a third text to score"])
    assert len(sl.Experiment.load(one.path).results.costs) == 3
    one.close()
    assert _refused_elsewhere(one.path), "the second one still uses it"
    two.close()
    assert not _refused_elsewhere(one.path)


def test_an_experiment_that_is_gone_frees_its_run(tmp_path: Path, tiny_llama_engine: sl.LensEngine) -> None:
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    exp.cost(sl.Plan(), ["the cat ran home"])
    path = exp.path
    assert _refused_elsewhere(path)
    del exp
    assert not _refused_elsewhere(path)


def lock_and_fork(folder: Path, pipe: Connection) -> None:
    """Holds a directory's lock, and tells whether a child that was forked meanwhile is refused it."""
    lock = RunLock(folder)
    child = os.fork()
    if child == 0:
        try:
            RunLock(folder)
        except RunError:
            os._exit(7)
        os._exit(0)
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    lock.release()


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    with other_process(lock_and_fork, tmp_path) as (_, pipe):
        assert pipe.recv() == 7


def _refused_elsewhere(folder: Path) -> bool:
    code = (
        "import sys\nfrom pathlib import Path\nfrom filelock import FileLock, Timeout\n"
        "try:\n    FileLock(Path(sys.argv[1]) / '.lock').acquire(timeout=0)\nexcept Timeout:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return done.stdout == "refused\n"
