import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

import steerlab as sl
from steerlab._cli.inputs import Blame
from steerlab._cli.sweep_runner import cells_of
from steerlab._cli.sweep_spec import sweep_of
from steerlab._cli.yaml_file import read_mapping
from tests.cli.conftest import command, write_changed
from tests.forked import start_forked

BASE = {
    "model": "./no-such-model",
    "pairs": {"path": "pairs.jsonl", "group": "group", "split": "train"},
    "vector": {"layer": 1},
    "targets": {"path": "targets.jsonl", "split": "test"},
    "doses": [-0.1, 0, 0.1],
    "controls": {"random": 0},
    "neutral": "neutral.txt",
    "max_ppl_ratio": 50,
}
SMALLEST = {"name": "trial", "base": BASE, "grid": {"layers": [1, 2]}}


@pytest.fixture
def write(own_data):
    """Writes the smallest sweep with changes in a folder with the data."""
    return lambda changes=None, name="sweep.yaml": write_changed(own_data / name, SMALLEST, changes)


def cells_in(path: Path):
    return cells_of(sweep_of(read_mapping(path), path), Blame(path))


def points(path: Path, *names: str) -> list[tuple]:
    return [tuple(cell.settings[name] for name in names) for cell in cells_in(path)]


# --- the grid -----------------------------------------------------------------------------------------------------


def test_every_combination_is_a_cell_the_last_key_varying_fastest(write):
    grid = {"layers": [2, 1], "methods": ["mean_diff", "pca_centred"], "seeds": [5, 3], "models": ["./a", "./b"]}
    found = points(write({"grid": grid}), "model", "seed", "method", "layer")
    wanted = [
        (m, s, e, k) for m in ("./a", "./b") for s in (5, 3) for e in ("mean_diff", "pca_centred") for k in (2, 1)
    ]
    assert found == wanted


def test_what_the_grid_leaves_out_is_as_in_the_base(write):
    (first, second) = cells_in(write({"base.seed": 7, "base.metric": "choice_prob", "base.plan": {"where": "all"}}))
    assert (first.vector.layer, second.vector.layer) == (1, 2)
    for cell in (first, second):
        assert (cell.seed, cell.metric, cell.doses, cell.max_ppl_ratio) == (7, "choice_prob", (-0.1, 0, 0.1), 50)
        assert cell.settings["where"] == "all"
        assert cell.engine.model == "./no-such-model"
        assert cell.neutral == ("The clock is on the table.", "Two plus two\nequals four.")
        assert cell.vector.pairs == sl.ContrastPairs.from_jsonl(
            write().parent / "pairs.jsonl", group="group", split="train"
        )


def test_a_dose_of_the_grid_is_measured_against_the_unsteered_model(write):
    cells = cells_in(write({"grid": {"doses": [0.2, [-1, 0, 1]]}}))
    assert [cell.doses for cell in cells] == [(0.0, 0.2), (-1, 0, 1)]


def test_plans_and_positions(write):
    plans = {"weak": {"dose": 0.5}, "gone": {"operator": "ablate"}}
    cells = cells_in(write({"grid": {"plans": plans, "positions": ["all", "prompt"]}}))
    assert [(c.settings["plan"], c.settings["where"]) for c in cells] == [
        ("weak", "all"),
        ("weak", "prompt"),
        ("gone", "all"),
        ("gone", "prompt"),
    ]
    import torch

    vector = sl.SteeringVector.from_tensor(torch.ones(4), layer=1)
    assert cells[0].make(vector) == sl.Plan(sl.add(vector, dose=0.5, where=sl.where.all()))
    assert cells[3].make(vector) == sl.Plan(sl.ablate(vector, where=sl.where.prompt()))


def test_several_vectors_and_one_from_a_file(write, vector_file):
    vectors = {"joy": {"layers": [1, 2]}, "kept": {"file": str(vector_file)}}
    changes = {"base.vector": None, "base.vectors": vectors, "grid": {"seeds": [0]}}
    path = write(changes)
    assert points(path, "vector", "layer", "method") == [
        ("joy", 1, "mean_diff"),
        ("joy", 2, "mean_diff"),
        ("kept", 1, "given"),
    ]
    assert cells_in(path)[2].vector.vector == sl.SteeringVector.load(vector_file)
    assert points(write({**changes, "grid": {"vectors": ["kept"]}}), "vector") == [("kept",)]


def test_the_base_may_be_a_file_whose_paths_count_from_itself(write, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    base = {**BASE, "name": "base", "model": "../llama"}
    for key in ("pairs", "targets"):
        base[key] = {**BASE[key], "path": f"../{BASE[key]['path']}"}
    (tmp_path / "elsewhere" / "base.yaml").write_text(yaml.safe_dump({**base, "neutral": "../neutral.txt"}))
    (tmp_path / "llama").mkdir()
    path = write({"base": "elsewhere/base.yaml"})
    assert {cell.engine.model for cell in cells_in(path)} == {str(tmp_path / "elsewhere" / "../llama")}
    assert points(path, "layer") == [(1,), (2,)]


def test_vllm_wires_the_layers_of_all_cells_once(write):
    changes = {"base.backend": "vllm", "grid": {"layers": [2, 1], "seeds": [0, 1]}}
    assert {str(dict(cell.engine.options)) for cell in cells_in(write(changes))} == {
        str({"dtype": "float32", "layers": [1, 2]})
    }
    moved = cells_in(write({**changes, "base.controls": {"random": 0, "wrong_layer": True}}))
    assert moved[0].engine.options["layers"] == "all"
    said = cells_in(write({**changes, "base.engine": {"layers": [0, 1, 2]}}))
    assert said[0].engine.options["layers"] == [0, 1, 2]


# --- complaints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"gird": {}}, "unknown key 'gird'; did you mean 'grid'? Its value is {}."),
        ({"grid.layer": [1]}, "unknown key 'grid.layer'; did you mean 'grid.layers'? Its value is [1]."),
        (
            {"grid.plans": {"a": {"operater": "add"}}},
            "unknown key 'grid.plans.a.operater'; did you mean 'grid.plans.a.op",
        ),
        ({"base.vector.layr": 3}, "base: unknown key 'vector.layr'; did you mean 'vector.layer'? Its value is 3."),
        ({"grid": None}, "the key 'grid' is missing."),
        ({"base": 3}, "base: "),
        ({"grid.layers": []}, "grid: layers is empty; leave it out"),
        ({"grid.layers": [1, 1]}, "grid: layers names 1 twice."),
        ({"grid.layers": ["top"]}, "grid.layers.0: input should be a valid integer, got 'top'."),
        ({"grid.doses": ["much"]}, "grid.doses.0: "),
        ({"base.pairs.path": "nothing.jsonl"}, "base: pairs: Cannot read "),
        ({"base.metric": "vibes"}, "base: metric: Unknown metric 'vibes'"),
        ({"grid.metrics": ["vibes"]}, "grid: Unknown metric 'vibes'"),
        ({"grid.methods": ["magic"]}, "grid.methods: "),
        ({"grid.sites": ["resid_pots"]}, "grid.sites: Unknown site 'resid_pots'"),
        ({"grid.doses": [0]}, "grid: doses are two or more distinct finite numbers"),
        ({"grid.vectors": ["joy"]}, "grid.vectors: the base has no vector 'joy'; there are trial."),
        (
            {"base.vector.layer": None, "base.vector.layers": "all", "grid": {"seeds": [0]}},
            "grid.layers: a sweep names",
        ),
        ({"name": "a/b"}, "name: "),
        ({"base": "sweep.yaml"}, "base: "),
        (
            {"base.engine": {"devcie": "cpu"}},
            "base: engine: the lens engine has no option 'devcie' (its value is 'cpu'); did",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_complaints_name_file_and_key(steerlab, write, changes, wanted):
    path = write(changes)
    said = steerlab("run", path).sentence
    assert said.startswith(f"{path}: ")
    assert wanted in said


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--workers", 2), "--workers needs --ray"),
        (("--gpus-per-worker", 1), "--gpus-per-worker needs --ray"),
        (("--ray", "--workers", 0), "workers is an integer ≥ 1, got 0."),
    ],
)
def test_options_of_ray(steerlab, write, options, wanted):
    assert wanted in steerlab("run", write(), *options).sentence


def test_ray_runs_sweeps_only(steerlab, write, tmp_path):
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({**BASE, "name": "one"}))
    assert "is one experiment; --ray runs" in steerlab("run", tmp_path / "one.yaml", "--ray").sentence


def test_without_ray_one_error_says_what_to_install(steerlab, write, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'steerlab[ray]'" in steerlab("run", write(), "--ray").sentence


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_from_its_file_to_its_rows(steerlab, write, tiny_llama_path, tmp_path):
    changes = {"base.model": str(tiny_llama_path), "base.entropy": True, "base.selfcheck": False, "root": "out"}
    path = write(changes)
    first = steerlab("run", path)
    assert first.code == 0, (first.err, first.exception)
    assert "of the base it leaves out: entropy" in first.out
    assert "2 of 2 cells are done (0 of them were there already), 0 failed" in first.out
    rows = pd.read_parquet(tmp_path / "out" / "trial" / "sweep.parquet")
    assert rows.groupby("cell").layer.unique().map(list).tolist() == [[1], [2]]
    assert len(rows) == 2 * 3 * 4
    again = steerlab("run", path)
    assert "2 of 2 cells are done (2 of them were there already)" in again.out
    anew = steerlab("run", path, "--overwrite")
    assert "2 of 2 cells are done (0 of them were there already)" in anew.out
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "trial" / "sweep.parquet"), rows)
    failing = steerlab("run", write({**changes, "grid.layers": [1, 9]}))
    assert failing.code == 1
    assert failing.err.startswith("failed: cell 1 (layer 9): HookPointError: Layer 9 does not exist")
    assert "1 of 2 cells are done (1 of them were there already), 1 failed" in failing.out


@pytest.mark.slow
def test_a_sweep_killed_by_the_system_goes_on(steerlab, write, tiny_llama_path, tmp_path):
    import time

    changes = {"base.model": str(tiny_llama_path), "base.selfcheck": False, "grid.layers": [1, 2], "root": "out"}
    path = write({**changes, "grid.seeds": [0, 1, 2], "base.controls": {"random": 3}})
    folder = tmp_path / "out" / "trial"
    program = start_forked(command, "run", path).process
    deadline = time.monotonic() + 240
    while len(list(folder.glob("cells/sweep/*.parquet"))) < 2:
        assert program.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.kill()
    program.join()
    before = {place: place.stat().st_mtime_ns for place in folder.glob("cells/sweep/*.parquet")}
    assert 2 <= len(before) < 6
    resumed = steerlab("run", path)
    assert f"6 of 6 cells are done ({len(before)} of them were there already)" in resumed.out
    assert {place: place.stat().st_mtime_ns for place in before} == before
    rows = pd.read_parquet(folder / "sweep.parquet")
    assert "6 of 6 cells are done (0 of them" in steerlab("run", path, "--overwrite").out
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "sweep.parquet"), rows, check_exact=True)
