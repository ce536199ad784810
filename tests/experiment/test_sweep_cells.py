import math
from pathlib import Path

import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.experiment._store.cells import Cell, pack, unpack
from steerlab.experiment.scaling import EngineRecipe, VectorRecipe, effect_of
from steerlab.experiment.scaling._cell import CELL_COLUMNS, SweepCell
from tests.experiment.data import DEV, PAIRS, TARGETS, TEXTS
from tests.experiment.sweep_cells import added, cell
from tests.tiny_models import build_tiny_llama


def key(one: SweepCell) -> str:
    return one.cell(one.engine.what()).key("")


def stronger(vector: sl.SteeringVector) -> sl.Plan:
    return sl.Plan(sl.add(vector, dose=2.0))


def difference(positive, negative) -> float:
    return float(positive.sum() - negative.sum())


def test_whatever_determines_numbers_changes_the_name_of_a_cell(tiny_llama_path: Path, tmp_path: Path) -> None:
    other = build_tiny_llama(tmp_path / "other", seed=1)
    path, pairs = tiny_llama_path, PAIRS.take([0, 1, 2])
    wide = EngineRecipe(str(path), "lens", {"dtype": "float64", "device": "cpu"})
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    variants = [
        cell(path),
        cell(path, layer=2),
        cell(path, seed=1),
        cell(other),
        cell(path, engine=wide),
        cell(path, make=stronger),
        cell(path, targets=DEV),
        cell(path, doses=(0.0, 0.1)),
        cell(path, controls=sl.Controls(random=0)),
        cell(path, metric="choice_prob"),
        cell(path, metric=difference),
        cell(path, max_ppl_ratio=2.0),
        cell(path, neutral=tuple(TEXTS[:1])),
        cell(path, neutral=None),
        cell(path, vector=VectorRecipe(1, pairs)),
        cell(path, vector=VectorRecipe(1, PAIRS, method="pca_uncentred")),
        cell(path, vector=VectorRecipe(1, PAIRS, site="resid_pre")),
        cell(path, vector=VectorRecipe(1, PAIRS, read=sl.where.all())),
        cell(path, vector=VectorRecipe(1, PAIRS, vector=vector)),
        cell(path, vector=VectorRecipe(1, None, vector=vector)),
    ]
    assert len({key(one) for one in variants}) == len(variants)


def test_what_determines_no_number_leaves_the_name_alone(tiny_llama_path: Path, tmp_path: Path) -> None:
    copy = build_tiny_llama(tmp_path / "copy")  # the same weights elsewhere
    harmless = EngineRecipe(str(copy), "lens", {"dtype": "float32", "device": "cpu", "batch_tokens": 64})
    same = cell(copy, settings={"model": "other name", "seed": 0, "layer": 1}, engine=harmless, doses=(0.1, -0.1, 0.0))
    assert key(same) == key(cell(tiny_llama_path))


def test_a_model_that_only_workers_have_is_known_by_its_name() -> None:
    assert EngineRecipe("./not-here").what()["model"] == "name:./not-here"


def test_a_cell_is_the_effect_that_an_experiment_measures(tiny_llama_path: Path) -> None:
    one = cell(tiny_llama_path, controls=sl.Controls(random=19))
    with sl.load(tiny_llama_path, device="cpu") as engine:
        rows, about = one.measure(engine, "hash-of-the-engine")
        exp = sl.Experiment("whole", engine, root=None)
        vector = exp.extract(PAIRS, layers=[1])[1]
        options = {"controls": sl.Controls(random=19), "max_ppl_ratio": 50.0, "neutral": TEXTS}
        wanted = exp.effect(added(vector), TARGETS, [-0.1, 0, 0.1], **options)
    assert list(rows.columns) == CELL_COLUMNS
    assert set(rows.engine_hash) == {"hash-of-the-engine"}
    shared = [name for name in wanted.rows.columns if name != "engine_hash"]
    pd.testing.assert_frame_equal(rows[shared], wanted.rows[shared])
    ratios = dict(zip(wanted.cost.dose, wanted.cost.ppl_ratio, strict=True))
    real = rows[rows.family == "vector"]
    assert real.ppl_ratio.tolist() == [ratios[dose] for dose in real.dose]
    assert all(math.isnan(ratio) for ratio in rows[rows.family != "vector"].ppl_ratio)
    what = one.cell(one.engine.what())
    stored = unpack(pack(Cell(what.kind, what.what, about), "hash-of-the-engine", rows), "here")
    assert effect_of(stored).summary() == wanted.summary()


def test_what_cannot_be_a_cell_is_refused(tiny_llama_path: Path) -> None:
    with pytest.raises(InputError, match="doses are two or more"):
        cell(tiny_llama_path, doses=(0.0,))
    with pytest.raises(InputError, match="Unknown metric 'vibes'"):
        cell(tiny_llama_path, metric="vibes")
    with pytest.raises(InputError, match="'dose' is a column"):
        cell(tiny_llama_path, settings={"dose": 1})
    with pytest.raises(DataError, match="there is neither"):
        VectorRecipe(1)
    vector = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    with pytest.raises(DataError, match="pairs"):
        cell(tiny_llama_path, vector=VectorRecipe(1, vector=vector), controls=sl.Controls(random=0, shuffled=19))
