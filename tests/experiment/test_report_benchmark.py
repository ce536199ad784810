"""The benchmark of large reports, on a small run of a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_measures_report_and_frames(tiny_llama_path: Path, tmp_path: Path) -> None:
    options = ["--model", str(tiny_llama_path), "--layer", "1", "--rows", "200", "--threads", "1"]
    places = ["--root", str(tmp_path / "runs"), "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "report.py"), *options, *places],
        cwd=ROOT,
        env={**psutil.Process().environ(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["rows"] >= 200
    assert set(figures["reports"]) == {
        f"{kind}, {how}" for kind in ("HTML", "Markdown") for how in ("as measured", "from its directory")
    }
    assert all(0 < one["seconds"] < 20 for one in figures["reports"].values())
    assert figures["reading"]["frames"] == len(list((tmp_path / "runs" / "large").rglob("*.parquet")))
    assert figures["reading"]["rows"] > figures["rows"]
    assert "| HTML, as measured |" in done.stdout
