"""The shipped examples run; `make demo` runs what `examples/sentiment.yaml` describes."""

from pathlib import Path

import pandas as pd
import pytest

import steerlab as sl

ROOT = Path(__file__).parents[2]


def copied(name: str, folder: Path) -> Path:
    """An example that reads the shipped data and writes elsewhere."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    path = folder / name
    path.write_text(text.replace("root: ../runs", "root: runs").replace("../vectors", str(ROOT / "vectors")))
    return path


@pytest.mark.slow
def test_select(steerlab, tmp_path: Path) -> None:
    done = steerlab("run", copied("select.yaml", tmp_path))
    assert done.code == 0, (done.err, done.exception)
    exp = sl.Experiment.load(tmp_path / "runs" / "select-example")
    assert exp.results.selections[0].layer in (10, 14, 18)
    assert exp.results.confirmations[0].look == 1
    assert exp.effects[0].verdict == "effect"
    assert (exp.path / "report.html").is_file()


@pytest.mark.slow
def test_sweep(steerlab, tmp_path: Path) -> None:
    done = steerlab("run", copied("sweep.yaml", tmp_path))
    assert done.code == 0, (done.err, done.exception)
    summary = pd.read_parquet(tmp_path / "runs" / "sweep-example" / "summary.parquet")
    assert summary[["method", "layer"]].to_numpy().tolist() == [
        ["mean_diff", 10],
        ["mean_diff", 18],
        ["pca_uncentred", 10],
        ["pca_uncentred", 18],
    ]
    assert set(summary.status) == {"done"}
    assert (summary.slope > 0).all()
