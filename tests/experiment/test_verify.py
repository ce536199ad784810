"""Verification catches a changed byte anywhere in a run, and a model that says something else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError, RunError
from steerlab.experiment._store.cells import pack
from steerlab.experiment.verify import largest_difference
from tests.experiment.data import PAIRS, PROMPTS, TARGETS, TEXTS


@pytest.fixture(scope="module")
def whole(tiny_llama_engine: sl.LensEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that nobody touches."""
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=3)
    vectors = exp.extract(PAIRS, layers=[1])
    plan = sl.Plan(sl.add(vectors[1], dose=1.0))
    exp.effect(plan, TARGETS, [-0.1, 0, 0.1], controls=sl.Controls(random=0), neutral=TEXTS, max_ppl_ratio=50.0)
    exp.entropy(plan.scaled(0.1), TEXTS)
    exp.generate(plan, PROMPTS, doses=[0, 0.1], max_new_tokens=4)
    exp.score(plan.scaled(0.1), TARGETS)
    exp.close()
    return exp.path


@pytest.fixture
def experiment(whole: Path, tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> sl.Experiment:
    """The run in a directory of its own, to be damaged."""
    shutil.copytree(whole, tmp_path / "run")
    return sl.Experiment("run", tiny_llama_engine, root=tmp_path, seed=3)


def failed(experiment: sl.Experiment, **options: int) -> set[tuple[str, str]]:
    found = experiment.verify(**options).failures
    return set(zip(found["check"], found["item"].map(lambda item: item.split("/")[0]), strict=True))


def change_byte(path: Path, offset: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)


def test_a_whole_run_is_verified_by_rerun_of_every_kind(experiment: sl.Experiment) -> None:
    found = experiment.verify(n=100)
    assert found.ok, str(found)
    rerun = found.table[found.table["check"] == "rerun"]
    assert {item.split("/")[1] for item in rerun["item"]} == {
        "scores",
        "nlls",
        "entropies",
        "generations",
        "score_rows",
    }
    assert rerun.detail.str.contains("largest difference").all()
    assert str(found).startswith("verified: ")
    assert len(experiment.verify().table.query("check == 'rerun'")) == 3


@pytest.mark.parametrize(
    "pattern",
    [
        "vectors/000.safetensors",
        "effects/000/rows.parquet",
        "effects/000/plan.json",
        "frames/entropy-000.parquet",
        "inputs/plans/*.json",
        "inputs/data/*.json",
        "cells/scores/*.parquet",
    ],
)
def test_a_changed_byte_is_caught(experiment: sl.Experiment, pattern: str) -> None:
    assert experiment.verify(n=0).ok
    path = sorted(experiment.path.glob(pattern))[0]
    offset = path.read_bytes().rfind(b'"values": "') + 20 if pattern.startswith("inputs/plans") else None
    change_byte(path, offset)
    found = experiment.verify(n=0)
    assert not found.ok
    broken = found.failures
    assert set(broken[broken["check"] == "file"]["item"]) == {path.relative_to(experiment.path).as_posix()}
    if pattern.startswith("inputs"):
        assert "input" in set(broken["check"]), "also what the file holds is not what its name says"
    assert path.name in str(found)
    with pytest.raises(RunError, match="NOT verified"):
        experiment.verify(n=0, strict=True)


def test_missing_and_foreign_files_are_caught(experiment: sl.Experiment) -> None:
    (cell, *_) = sorted(experiment.path.glob("cells/scores/*.parquet"))
    cell.unlink()
    (experiment.path / "cells" / "scores" / "0000000000000000.parquet").write_bytes(b"?")
    found = experiment.verify(n=0).failures
    details = dict(zip(found["item"], found["detail"], strict=True))
    assert details[cell.relative_to(experiment.path).as_posix()] == "it is missing"
    assert {"it is missing", "it is not in the manifest"} <= set(found["detail"])


def test_a_figure_that_does_not_follow_from_its_rows_is_caught(experiment: sl.Experiment) -> None:
    path = experiment.path / "effects" / "000" / "effect.json"
    stated = json.loads(path.read_text())
    stated["summary"]["slope"] += 0.01
    experiment._session.folder.write("effects/000/effect.json", json.dumps(stated))  # pyright: ignore
    assert failed(experiment, n=0) == {("effect", "effects")}


def test_an_invented_cell_is_caught_by_rerun(experiment: sl.Experiment) -> None:
    """Hashes prove that nothing changed since it was written; only the model can say that it was ever measured."""
    cells = experiment._session.cells
    place = next(place for place in cells.stored() if place.startswith("cells/scores/"))
    stored = cells.read(place)
    invented = stored.frame.assign(log_prob=stored.frame.log_prob + 0.01)
    experiment._session.folder.write(place, pack(stored.cell, stored.engine_hash, invented))  # pyright: ignore
    assert failed(experiment, n=0) == set()
    assert failed(experiment, n=100) == {("rerun", "cells")}
    assert failed(experiment, n=100, tolerance=0.1) == set()


def test_another_model_is_caught_by_rerun(experiment: sl.Experiment) -> None:
    weight = experiment.engine.model.original_model.get_output_embeddings().weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(1.1)
        assert ("rerun", "cells") in failed(experiment, n=100)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert experiment.verify(n=100).ok


def test_the_sample_is_seeded(experiment: sl.Experiment) -> None:
    def chosen(seed: int) -> list[str]:
        table = experiment.verify(n=2, seed=seed).table
        return table[table["check"] == "rerun"]["item"].tolist()

    assert chosen(0) == chosen(0)
    assert len({tuple(chosen(seed)) for seed in range(5)}) > 1
    with pytest.raises(InputError, match="≥ 0"):
        experiment.verify(n=-1)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda frame: frame, 0.0),
        (lambda frame: frame.assign(x=[1.0, 2.5]), 0.5),
        (lambda frame: frame.assign(x=[float("nan"), 2.0]), float("inf")),
        (lambda frame: frame.assign(n=[1, 3]), float("inf")),
        (lambda frame: frame.assign(ids=[[0.1], [0.2, 0.5]]), 0.25),
        (lambda frame: frame.assign(ids=[[0.1], [0.2]]), float("inf")),
        (lambda frame: frame.iloc[:1], float("inf")),
        (lambda frame: frame.rename(columns={"x": "y"}), float("inf")),
    ],
)
def test_largest_difference(change: Callable[[pd.DataFrame], pd.DataFrame], difference: float) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "n": [1, 2], "ids": [[0.1], [0.2, 0.25]]})
    assert largest_difference(frame, change(frame))[0] == pytest.approx(difference)


def test_missing_values_agree_with_each_other() -> None:
    frame = pd.DataFrame({"x": [float("nan"), float("inf")]})
    assert largest_difference(frame, frame.copy())[0] == 0
