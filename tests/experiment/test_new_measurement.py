"""A further kind of measurement is one description: it is stored, loaded, listed and reported by it."""

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest

import steerlab as sl
from steerlab.experiment import experiment as experiment_module
from steerlab.experiment._blocks import Section
from steerlab.experiment._blocks.findings import Finding, finding_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._report import document as document_function
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements._registry import KINDS, MEASUREMENTS


@dataclass(frozen=True)
class Length:
    """How long prompts are."""

    rows: pd.DataFrame = field(repr=False)
    mean: float
    longest: float = float("inf")


def measure_length(run: Run, prompts: list[str]) -> Length:
    """The lengths of prompts, in characters; kept in the run."""
    run.session.open()
    known = run.find("length", prompts)
    if known is not None:
        return known
    with run.measuring("length", lambda: ([prompts], None)):
        rows = pd.DataFrame({"prompt": prompts, "length": [len(prompt) for prompt in prompts]})
    return run.keep("length", prompts, Length(rows, float(rows.length.mean())))


def sections(m: Material) -> list[Section]:
    return finding_sections("Lengths", [Finding([f"Mean {one.mean:g}."], one.rows) for one in m.of("lengths")])


LENGTH = Measurement(finding_kind("length", "lengths", Length), sections)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in the registry."""
    monkeypatch.setattr(experiment_module, "KINDS", (*KINDS, LENGTH.kind))
    monkeypatch.setitem(document_function.__globals__, "MEASUREMENTS", (*MEASUREMENTS, LENGTH))


def test_it_is_stored_loaded_listed_and_reported(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        made = measure_length(exp._run, ["the cat", "a dog"])
        assert measure_length(exp._run, ["the cat", "a dog"]) is made
        assert exp.results.lengths == [made]
        assert [look.kind for look in exp.looks] == ["length"]
    loaded = sl.Experiment.load(tmp_path / "run")
    (found,) = loaded.results.lengths
    assert (found.mean, found.longest) == (6.0, float("inf"))
    pd.testing.assert_frame_equal(found.rows, made.rows)
    assert "Mean 6." in loaded.report(tmp_path / "report.md").read_text()
    assert loaded.verify(n=0).ok


def test_a_report_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(sl.InputError, match="no kind of result 'effect'"):
        document_function(Material("x", 0, effect=[1]))
