"""A run that an earlier version wrote loads, verifies and is reported as that version did.

`earlier_run/run.zip` holds a run directory with a result of every kind, and what that version said of each in
`told.json`.
"""

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steerlab as sl
from steerlab.experiment.measurements._registry import MEASUREMENTS

LATER_KINDS = {"preregistration", "baseline", "judgement", "protocol"}
STORED = Path(__file__).with_name("earlier_run") / "run.zip"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(STORED) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def experiment(folder: Path) -> sl.Experiment:
    return sl.Experiment.load(folder / "all")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "told.json").read_text(encoding="utf-8"))


def test_every_kind_of_result_is_there(experiment: sl.Experiment) -> None:
    for measurement in MEASUREMENTS:
        if measurement.kind.name in LATER_KINDS:
            continue
        assert getattr(experiment.results, measurement.kind.attribute), measurement.kind.name


def test_figures_of_effects_are_the_same(experiment: sl.Experiment, told: dict[str, Any]) -> None:
    found = json.loads(json.dumps([effect.summary() for effect in experiment.effects]))
    assert len(found) == len(told["effects"]) == 2
    for now, then in zip(found, told["effects"], strict=True):
        assert now.keys() >= then.keys()
        assert now["settings"].items() >= then["settings"].items()
        assert [reason for reason in now["reasons"] if "rule 1" not in reason] == then["reasons"]
        for name, value in then.items():
            if name in ("settings", "reasons"):
                continue
            if isinstance(value, float):
                np.testing.assert_allclose(now[name], value, rtol=1e-9, err_msg=name)
            else:
                assert json.dumps(now[name], sort_keys=True) == json.dumps(value, sort_keys=True), name


def test_effects_say_by_which_rule_they_were_judged(experiment: sl.Experiment, tmp_path: Path) -> None:
    for effect in experiment.effects:
        assert effect.settings.rule == 1
        assert effect.verdict == "no effect", "as it was told then"
        (said,) = [reason for reason in effect.reasons if "rule 1" in reason]
        assert said.endswith("by the present rule the verdict is inconclusive.")
    assert said in experiment.report(tmp_path / "report.md").read_text(encoding="utf-8")


def as_then(text: str) -> str:
    """A sentence with what that version wrote in another way: small figures, and a search without constraints."""
    text = re.sub(r"(\d+) tries, with no constraint", r"\1 tries, of which \1 satisfy no constraint", text)
    return re.sub(r"[+-]0\.00\d+", lambda found: format(float(found[0]), "+.3f"), text)


@pytest.mark.parametrize("kind", ["selfchecks", "selections", "confirmations", "interactions", "transfers", "parities"])
def test_findings_say_the_same(experiment: sl.Experiment, told: dict[str, Any], kind: str) -> None:
    assert [as_then(str(finding)) for finding in getattr(experiment.results, kind)] == told[kind]


def test_frames_vectors_and_looks_are_the_same(experiment: sl.Experiment, told: dict[str, Any]) -> None:
    results = experiment.results
    for kind, shapes in told["frames"].items():
        assert [[list(frame.columns), len(frame)] for frame in getattr(results, kind)] == shapes
    assert [{str(k): v.hash for k, v in found.items()} for found in results.vectors] == told["vectors"]
    assert [getattr(look, "kind", "confirm") for look in experiment.looks] == told["looks"]


def test_it_verifies_and_is_reported(experiment: sl.Experiment, tmp_path: Path) -> None:
    assert experiment.verify(n=0).ok, str(experiment.verify(n=0))
    text = experiment.report(tmp_path / "report.md").read_text(encoding="utf-8")
    for title in ("Effect 1", "Selfcheck", "Selection", "Confirmation", "Interaction", "Transfer", "Parity", "Vectors"):
        assert title in text


def test_the_same_model_adds_to_it(folder: Path, tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "copy"))
    exp = sl.Experiment("all", tiny_llama_engine, root=folder, seed=3)
    before = len(exp.results.generations)
    plan = exp.results.effects[0][1]
    exp.generate(plan, ["a stone"], doses=[0, 0.1], max_new_tokens=2)
    exp.close()
    again = sl.Experiment.load(folder / "all")
    assert len(again.results.generations) == before + 1
    assert again.verify(n=0).ok


def test_a_report_names_the_rule_of_its_intervals(folder: Path, experiment: sl.Experiment) -> None:
    report = experiment.report(folder / "again.md").read_text(encoding="utf-8")
    assert "with intervals by percentile bootstrap over texts" in report  # kept as they were
    assert "with intervals by Student's t over texts" in report  # of entropies, which are kept as rows
