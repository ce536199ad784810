"""A run that is killed at any moment goes on where it stopped and ends as if nothing had happened."""

from pathlib import Path

import pytest

from tests.experiment.killed_runs import kill_and_resume
from tests.forked import run_forked

KILLS = 4


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_resumes_to_the_same_frame(tiny_llama_path: Path, tmp_path: Path) -> None:
    runs = run_forked(kill_and_resume, tiny_llama_path, tmp_path, 0, KILLS)
    assert len(runs) == KILLS
    for run in runs:
        assert run["reused"] == run["kept"], "what was finished is not measured again"
        assert run["reused"] + run["measured"] == run["total"]
        assert run["verified"].startswith("verified")
        assert run["leftovers"] == 0, "half-written files are cleared away"
    # The moments must fall into the sweep, not before or after it, or nothing was tested.
    assert sum(run["killed"] and 0 < run["kept"] < run["total"] for run in runs) >= KILLS // 2
