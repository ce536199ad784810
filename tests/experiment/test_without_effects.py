"""Reports, verdicts and winners where something is missing: no effect, no null family, no room left in the grid."""

import json
import re
from pathlib import Path

import pytest
import torch

import steerlab as sl
from steerlab._cli.spec import ExperimentSpec
from steerlab.core.errors import RunError
from steerlab.experiment.measurements.selection import Selection
from tests.experiment.data import DEV, HELD_OUT, TARGETS


def vector(seed: int = 0, layer: int = 1) -> sl.SteeringVector:
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=layer, name=f"v{seed}")


@pytest.fixture
def exp(tiny_llama_engine: sl.LensEngine, tmp_path: Path):
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as found:
        yield found


def test_what_was_measured_is_reported_without_an_effect(exp: sl.Experiment) -> None:
    with pytest.raises(RunError, match="nothing to report yet"):
        exp.report()
    exp.selfcheck(layers=[1])
    assert "## Selfcheck" in exp.report(exp.path / "a.md").read_text()
    best = exp.select(vector(), [0.1, 0.2], DEV)
    exp.confirm(best, HELD_OUT)
    text = exp.report(exp.path / "b.md").read_text()
    for title in (
        "## Selfcheck",
        "## Selection on development items",
        "## Confirmation on held-out items",
        "## Vectors",
    ):
        assert title in text
    assert not re.search(r"\bnan\b", text)
    assert exp.report().read_text().startswith("<!DOCTYPE html>")


def test_an_effect_without_nulls_is_not_tested(exp: sl.Experiment) -> None:
    plan = sl.Plan(sl.add(vector(), dose=1.0))
    options = {"controls": sl.Controls(random=0), "neutral": ["the cat ran home"], "max_ppl_ratio": 99.0}
    for doses in ([0, 0.1, 0.2], [0, 0.1]):
        effect = exp.effect(plan, TARGETS, doses, **options)
        assert effect.verdict == "not tested"
        assert any("No null family" in reason for reason in effect.reasons)
        assert "nan" not in str(effect)
    text = exp.report(exp.path / "report.md").read_text()
    assert "Verdict: not tested" in text
    assert not re.search(r"\bnan\b", text)
    stated = exp.path / "effects/000/effect.json"
    old = json.loads(stated.read_text())
    old["summary"]["verdict"] = "no effect"
    exp._session.folder.write("effects/000/effect.json", json.dumps(old))
    assert exp.verify(n=0).ok, "an effect that an earlier version wrote"


def test_the_winner_is_a_vector_with_a_name_and_is_read_back(exp: sl.Experiment) -> None:
    best = exp.select({"a": vector(), "b": vector(1)}, [0.1, 0.2], DEV)
    read = sl.Experiment.load(exp.path).results.selections[0]
    for found in (best, read):
        assert found.vector == {"a": vector(), "b": vector(1)}[found.vector_name]
        assert found.vector.name in ("v0", "v1")
        assert str(found).startswith(f"{found.vector_name} at layer 1")
    assert exp.confirm(read, HELD_OUT).selection.startswith(f"{best.vector_name} at layer 1")
    place = exp.path / "findings/selection-000/finding.json"
    old = json.loads(place.read_text())
    old["vector"] = old.pop("vector_name")
    place.write_text(json.dumps(old))
    again = sl.Experiment.load(exp.path).results.selections[0]
    assert (again.vector_name, again.vector) == (best.vector_name, best.vector), "as an earlier version wrote it"


@pytest.mark.parametrize(
    ("layer", "dose", "edges"),
    [
        (2, 0.2, []),
        (2, 0.1, []),
        (2, 0.4, ["the highest dose tried"]),
        (2, -0.3, ["the lowest dose tried"]),
        (1, 0.1, ["the first layer tried"]),
        (3, 0.4, ["the highest dose tried", "the last layer tried"]),
    ],
)
def test_a_winner_at_the_end_of_the_grid_says_so(exp: sl.Experiment, layer: int, dose: float, edges: list[str]) -> None:
    grid = {"v": sl.VectorSet(tuple(vector(layer=k) for k in (1, 2, 3)))}
    made = exp.select(grid, [-0.3, 0.1, 0.2, 0.4], DEV)
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    found = Selection(**fields | {"layer": layer, "dose": dose})
    assert found.edges == edges
    assert ("may lie beyond the grid" in str(found)) == bool(edges)


def spec(**changes: object) -> ExperimentSpec:
    given = {
        "name": "x",
        "pairs": {"path": "pairs.jsonl"},
        "vector": {"layer": 1},
        "targets": {"path": "targets.jsonl"},
        "doses": [0, 1],
        "select": {"targets": {"path": "dev.jsonl"}, "doses": [0.1]},
        "controls": {"random": 30, "shuffled": 20},
    }
    return ExperimentSpec.model_validate(given | changes)


def test_a_confirmation_in_a_file_uses_the_nulls_that_were_asked_for() -> None:
    assert spec(confirm=True).confirm_controls.shuffled == 20
    assert spec(confirm={"allow_overlap": True}).confirm_controls.random == 30
    assert spec(confirm={"controls": {"random": 19}}).confirm_controls.model_dump() == {
        "random": 19,
        "shuffled": 0,
        "wrong_layer": False,
    }
