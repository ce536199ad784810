"""A step that was slow because other programs used the cores says so once; nothing else is said, and nothing is set."""

from pathlib import Path

import pytest
import torch

from steerlab.experiment._store import waiting
from steerlab.experiment._store.waiting import Waiting, seconds_waited


def test_the_kernel_s_counts_are_added_up_over_the_threads_that_live(tmp_path: Path) -> None:
    for thread, text in {"1": "10 1500000000 3", "2": "10 500000000 3", "3": "not counted"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "4").mkdir()
    assert seconds_waited(tmp_path) == 2.0
    assert seconds_waited(tmp_path / "nowhere") == 0.0
    assert seconds_waited() >= 0.0


@pytest.mark.parametrize(
    ("threads", "seconds", "waited", "told"),
    [(2, 100.0, 80.0, True), (1, 100.0, 80.0, False), (2, 10.0, 9.0, False), (2, 100.0, 10.0, False)],
)
def test_only_a_long_step_of_several_waiting_threads_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    threads: int,
    seconds: float,
    waited: float,
    told: bool,
) -> None:
    monkeypatch.setattr(Waiting, "_told", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for _ in range(2):
        clock, counted = iter([0.0, seconds]), iter([0.0, waited])
        with monkeypatch.context() as now:
            now.setattr(waiting.time, "monotonic", lambda clock=clock: next(clock))
            now.setattr(waiting, "seconds_waited", lambda counted=counted: next(counted))
            Waiting("effect").end()
    assert capsys.readouterr().err.count("OMP_NUM_THREADS=1") == told
