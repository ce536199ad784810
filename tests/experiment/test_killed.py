"""A run that is killed at any moment goes on where it stopped and ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_runs.py")
KILLS = 5


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_resumes_to_the_same_frame(tiny_llama_path: Path, tmp_path: Path) -> None:
    root = PROGRAM.parents[2]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tiny_llama_path), str(tmp_path), "0", str(KILLS)],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert len(runs) == KILLS
    for run in runs:
        assert run["reused"] == run["kept"], "what was finished is not measured again"
        assert run["reused"] + run["measured"] == run["total"]
        assert run["verified"].startswith("verified")
        assert run["leftovers"] == 0, "half-written files are cleared away"
    # The moments must fall into the sweep, not before or after it, or nothing was tested.
    assert sum(run["killed"] and 0 < run["kept"] < run["total"] for run in runs) >= KILLS // 2
