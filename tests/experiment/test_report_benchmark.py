"""The benchmark of large reports, on a small run of a tiny model."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_it_measures_report_and_frames(
    tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # scripts import from each other by name
    spec = importlib.util.spec_from_file_location("benchmark_of_reports", FOLDER / "report.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "CONTROLS", {"random": 3, "shuffled": 3, "wrong_layer": True})
    options = ["--model", str(tiny_llama_path), "--layer", "1", "--rows", "100", "--threads", "1"]
    places = ["--root", str(tmp_path / "runs"), "--out", str(tmp_path / "figures.json")]
    monkeypatch.setattr(sys, "argv", ["report.py", *options, *places])
    script.main()
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["rows"] >= 100
    assert set(figures["reports"]) == {
        f"{kind}, {how}" for kind in ("HTML", "Markdown") for how in ("as measured", "from its directory")
    }
    assert all(0 < one["seconds"] for one in figures["reports"].values())
    assert figures["reading"]["frames"] == len(list((tmp_path / "runs" / "large").rglob("*.parquet")))
    assert figures["reading"]["rows"] > figures["rows"]
    assert "| HTML, as measured |" in capsys.readouterr().out
