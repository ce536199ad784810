"""A shipped example runs, on a third of its prompts; `make demo` runs what `examples/sentiment.yaml` describes."""

import json
from pathlib import Path

import pytest

import steerlab as sl

ROOT = Path(__file__).parents[2]


def copied(name: str, folder: Path) -> Path:
    """An example that reads a third of the shipped targets, a prompt of each group, and writes elsewhere."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    lines = (ROOT / "vectors" / "sentiment" / "targets.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    first = {row["group"]: row["prompt"] for row in reversed(rows)}
    kept = [line for line, row in zip(lines, rows, strict=True) if first[row["group"]] == row["prompt"]]
    (folder / "targets.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    text = text.replace("root: ../runs", "root: runs").replace("../vectors/sentiment/targets.jsonl", "targets.jsonl")
    path = folder / name
    path.write_text(text.replace("../vectors", str(ROOT / "vectors")), encoding="utf-8")
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
