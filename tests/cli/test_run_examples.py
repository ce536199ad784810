"""A shipped example runs; `make demo` runs what `examples/sentiment.yaml` describes."""

from pathlib import Path

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
