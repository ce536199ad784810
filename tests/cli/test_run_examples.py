"""A shipped example runs, on a tiny model; `make demo` runs what `examples/sentiment.yaml` says, on the real one."""

from pathlib import Path

import pytest

import steerlab as sl

ROOT = Path(__file__).parents[2]


def copied(name: str, folder: Path, changes: dict[str, str]) -> Path:
    """An example with other values at some places, which must be there; it reads the shipped data, writes elsewhere."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    for old, new in {"root: ../runs": "root: runs", "../vectors": str(ROOT / "vectors"), **changes}.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
def test_select(steerlab, tiny_llama_path: Path, tmp_path: Path) -> None:
    changes = {"model: smollm2-135m": f"model: {tiny_llama_path}", "layers: [10, 14, 18]": "layers: [1, 2, 3]"}
    changes |= {"random: 19": "random: 4"}
    done = steerlab("run", copied("select.yaml", tmp_path, changes))
    assert done.code == 0, (done.err, done.exception)
    exp = sl.Experiment.load(tmp_path / "runs" / "select-example")
    (selection,) = exp.results.selections
    assert selection.layer in (1, 2, 3)
    assert len(selection.table) == 3 * 2
    assert exp.results.confirmations[0].look == 1
    (effect,) = exp.effects
    assert f"blocks.{selection.layer}.hook_resid_post" in effect.plan_text
    assert effect.doses == [-0.2, 0.0, 0.2]
    assert len(exp.results.costs) == 1
    assert (exp.path / "report.html").is_file()
