"""Going on with a run: what is there is read, what belongs to another configuration is refused."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import steerlab as sl
from steerlab.core.errors import InputError, RunError
from tests.experiment.data import DEV, HELD_OUT, PAIRS, PROMPTS, TARGETS, TEXTS

DOSES = [-0.2, 0.0, 0.1, 0.2]
CONTROLS = sl.Controls(random=19, wrong_layer=True)
OPTIONS = {"controls": CONTROLS, "neutral": TEXTS, "max_ppl_ratio": 50.0}


def notebook(exp: sl.Experiment) -> dict[str, object]:
    """What a notebook would do, from vectors to a confirmation."""
    vectors = exp.extract(PAIRS, layers=[1, 2])
    plan = sl.Plan(sl.add(vectors[1], dose=1.0))
    effect = exp.effect(plan, TARGETS, DOSES, **OPTIONS)
    best = exp.select(vectors, [0.1, 0.2], DEV, subject_to={"ppl_ratio": 50.0, "entropy_change": 9.0}, texts=TEXTS)
    return {
        "rows": effect.rows,
        "cost": exp.cost(plan, TEXTS, doses=[0, 0.2], prompts=PROMPTS, max_new_tokens=4),
        "entropy": exp.entropy(plan.scaled(0.2), TEXTS),
        "generations": exp.generate(plan, PROMPTS, doses=[0, 0.2], max_new_tokens=4),
        "scores": exp.score(plan.scaled(0.1), TARGETS).to_frame(),
        "tries": best.table,
        "confirmed": exp.confirm(best, HELD_OUT).rows,
        "grid": exp.interaction(plan, sl.Plan(sl.ablate(vectors[2])), TARGETS).rows,
        "elsewhere": exp.transfer(plan, HELD_OUT, DOSES).rows,
    }


@pytest.fixture(scope="module")
def done(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    root = tmp_path_factory.mktemp("runs")
    with sl.Experiment("run", tiny_llama_path, root=root, seed=3) as exp:
        return root / "run", notebook(exp)


def test_a_notebook_run_again_needs_no_model(
    done: tuple[Path, dict[str, object]], tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = done
    again = sl.Experiment("run", tiny_llama_path, root=path.parent, seed=3)
    after = notebook(again)
    assert not again._session.loaded
    assert again._session.cells.measured == 0
    for name, frame in before.items():
        pd.testing.assert_frame_equal(after[name], frame, obj=name)
    told = capsys.readouterr().err
    assert re.findall(r"^info: effect: 49 of 49 cells were there already, from an earlier run", told, re.M)
    assert told.count("there already") == 1, "the other measurements are not told of"
    assert again.results.confirmations[0].look == 1, "the same look again is no second one"
    for kind in ("effects", "costs", "entropies", "generations", "vectors", "selections", "interactions", "transfers"):
        assert len(getattr(again.results, kind)) == 1, kind
    again.close()


def test_everything_is_read_back(done: tuple[Path, dict[str, object]]) -> None:
    path, before = done
    loaded = sl.Experiment.load(path)
    results = loaded.results
    pd.testing.assert_frame_equal(results.selections[0].table, before["tries"])
    pd.testing.assert_frame_equal(results.confirmations[0].rows, before["confirmed"])
    pd.testing.assert_frame_equal(results.interactions[0].rows, before["grid"])
    pd.testing.assert_frame_equal(results.transfers[0].rows, before["elsewhere"])
    assert results.selections[0].plan.hash == results.confirmations[0].plan_hash
    assert results.selections[0].prompts, "sets survive"
    assert loaded.verify(n=0).ok


def test_every_frame_is_plain_for_any_reader(done: tuple[Path, dict[str, object]]) -> None:
    paths = sorted(done[0].rglob("*.parquet"))
    kinds = {path.relative_to(done[0]).parts[0] for path in paths}
    assert kinds == {"cells", "effects", "findings", "frames"}
    for path in paths:
        schema, empty = pq.read_schema(path), pq.read_metadata(path).num_rows == 0
        assert not [name for name in schema.names if name.startswith("__index")], path
        for field in schema:
            inner = field.type.value_type if pa.types.is_list(field.type) else field.type
            plain = ("int64", "double", "bool", "string", "large_string", *["null"] * empty)
            assert str(inner) in plain, (path, field)
        in_pandas, in_polars = pd.read_parquet(path), pl.read_parquet(path)
        assert list(in_pandas.columns) == in_polars.columns
        assert len(in_pandas) == len(in_polars)


def test_another_look_at_held_out_items_is_recorded(
    done: tuple[Path, dict[str, object]], tiny_llama_path: Path
) -> None:
    root = done[0].parent / "looks"
    shutil.copytree(done[0], root / "run")
    exp = sl.Experiment("run", tiny_llama_path, root=root, seed=3)
    vectors = exp.extract(PAIRS, layers=[1, 2])
    second = exp.select(vectors, [0.1], DEV)
    assert exp.confirm(second, HELD_OUT).look == 3, "after the first confirmation and the transfer"
    assert [found.look for found in sl.Experiment.load(exp.path).results.confirmations] == [1, 3]
    exp.close()


def test_vectors_read_back_remember_their_engine(done: tuple[Path, dict[str, object]], tiny_llama_path: Path) -> None:
    again = sl.Experiment("run", tiny_llama_path, root=done[0].parent, seed=3)
    vectors = again.extract(PAIRS, layers=[1, 2])
    fresh = sl.Experiment("fresh", tiny_llama_path, root=None, seed=3).extract(PAIRS, layers=[1, 2], name="run")
    assert vectors == fresh
    assert not again._session.loaded
    dev = sl.ContrastPairs.from_lists(["a hen ran home", "the cow sat"], ["a hen ran away", "the cow stood"])
    frame = vectors.diagnostics(dev, n_splits=1).to_frame()
    assert again._session.loaded
    assert frame.layer.tolist() == [1, 2]
    again.close()


def test_another_metric_measures_nothing(done: tuple[Path, dict[str, object]], tiny_llama_path: Path) -> None:
    again = sl.Experiment("run", tiny_llama_path, root=done[0].parent, seed=3)
    plan = again.results.effects[0][1]
    one = again.effect(plan, TARGETS, DOSES, metric="choice_prob", **OPTIONS)
    other = again.effect(plan, TARGETS, DOSES, metric=lambda p, n: float(p.max() - n.max()), **OPTIONS)
    assert again._session.cells.measured == 0
    assert ((one.rows.value >= 0) & (one.rows.value <= 1)).all()
    assert (one.rows.value != other.rows.value).any()
    assert len(again.effects) == 3
    again.close()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"seed": 4}, "seed 3 there, 4 here"),
        ({"dtype": "bfloat16"}, "dtype 'float32' there, 'bfloat16' here"),
        ({"backend": "vllm", "layers": [1]}, "backend 'lens' there, 'vllm' here"),
    ],
)
def test_another_configuration_is_refused_at_once(
    done: tuple[Path, dict[str, object]], tiny_llama_path: Path, changed: dict, complaint: str
) -> None:
    with pytest.raises(RunError, match=complaint):
        sl.Experiment("run", tiny_llama_path, root=done[0].parent, **({"seed": 3} | changed))


def test_other_weights_are_refused_before_anything_is_measured(
    done: tuple[Path, dict[str, object]], tiny_gpt2_engine: sl.LensEngine, tiny_gpt2_path: Path
) -> None:
    with pytest.raises(RunError, match="model weights"):
        sl.Experiment("run", tiny_gpt2_engine, root=done[0].parent, seed=3)
    exp = sl.Experiment("run", tiny_gpt2_path, root=done[0].parent, seed=3)  # known only when it loads
    with pytest.raises(RunError, match=r"model weights.*overwrite=True"):
        exp.cost(sl.Plan(), TEXTS)
    assert not (done[0] / ".lock.json").exists(), "what was refused holds no lock"


def test_other_library_versions_measure_anew(
    done: tuple[Path, dict[str, object]], tiny_llama_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(done[0], tmp_path / "run")
    stated = json.loads((tmp_path / "run" / "run.json").read_text())
    stated["fingerprint"]["versions"]["torch"] = "1.0"
    (tmp_path / "run" / "run.json").write_text(json.dumps(stated))
    exp = sl.Experiment("run", tiny_llama_path, root=tmp_path, seed=3)
    exp.entropy(exp.results.effects[0][1].scaled(0.2), TEXTS)
    assert exp._session.loaded, "what would be measured now must be found out"
    exp.close()


def test_an_experiment_in_memory_writes_nothing(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    exp = sl.Experiment("memory", tiny_llama_engine, root=None)
    exp.cost(sl.Plan(), TEXTS)
    with pytest.raises(RunError, match="in memory"):
        exp.save()
    assert exp.verify(n=2).ok
    assert not list(tmp_path.iterdir())


def test_a_root_that_cannot_be_made_is_refused(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path / "file")
    with pytest.raises(RunError, match="root=None"):
        exp.cost(sl.Plan(), TEXTS)


def test_a_run_directory_that_vanishes_does_not_disturb_the_end(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path
) -> None:
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    exp.cost(sl.Plan(), TEXTS)
    shutil.rmtree(exp.path)
    exp.close()
    exp.close()


def test_starting_anew_removes_the_run_and_a_save_of_the_same_does_not(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path
) -> None:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        exp.cost(sl.Plan(), TEXTS)
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        exp.save(overwrite=True)
        assert len(sl.Experiment.load(exp.path).results.costs) == 1
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path, overwrite=True) as exp:
        exp.entropy(sl.Plan(), TEXTS)
        assert not sl.Experiment.load(exp.path).results.costs
        assert exp._session.cells.reused == 0


def test_vllm_needs_to_know_the_layers() -> None:
    exp = sl.Experiment("vllm", "smollm2-135m", backend="vllm", root=None)
    with pytest.raises(InputError, match="layers="):
        exp.engine  # noqa: B018
    with pytest.raises(InputError, match="lens, vllm"):
        sl.Experiment("other", backend="other", root=None)
