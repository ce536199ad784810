"""Case X5: a plan where it was not made; other weights and processing are named, another width is refused."""

import math
import warnings

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import VectorShapeError
from steerlab.experiment.measurements.transfer import compare_transfers, transfer
from tests.tiny_models import build_tiny_llama


def targets(prompts):
    return sl.Targets.from_records(
        [
            {"prompt": prompt, "target": target, "label": label}
            for prompt in prompts
            for target, label in [(" ran", 1), (" flew off", -1)]
        ]
    )


HERE, THERE = targets(["the cat", "a dog", "the bird"]), targets(["a fish", "my brother"])
PAIRS = sl.ContrastPairs.from_lists(["the cat ran", "a dog sat", "it flew"], ["the cat fell", "a dog ate", "it swam"])
DOSES = [-0.2, 0.0, 0.2]


@pytest.fixture(scope="module")
def plan(tiny_llama_engine):
    return sl.Plan(sl.add(sl.extract(tiny_llama_engine, PAIRS, layers=[1])[1], dose=1.0))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    with sl.load(build_tiny_llama(tmp_path_factory.mktemp("other") / "llama", seed=1), device="cpu") as engine:
        yield engine


def test_at_home_there_is_nothing_to_note(tiny_llama_engine, plan):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = transfer(tiny_llama_engine, plan, HERE, DOSES)
    assert found.notes == ()
    table = []
    for dose in DOSES:
        scores = tiny_llama_engine.score(HERE.prompts, [i.targets for i in HERE], plan=plan.scaled(dose)).log_prob
        table.append(scores[0::2] - scores[1::2])
    slopes = np.polyfit(DOSES, np.array(table), 1)[0]
    assert found.slope == pytest.approx(slopes.mean(), abs=1e-3)
    assert found.anti_steerable == np.mean(slopes < 0)
    assert found.rows.value.to_numpy() == pytest.approx(np.concatenate(table), abs=1e-5)
    assert found.rows.dose.tolist() == [d for d in DOSES for _ in range(3)]
    assert found.low <= found.slope <= found.high
    shown = f"log_prob_margin {found.slope:+.3f} [{found.low:+.3f}, {found.high:+.3f}] per unit of dose, from"
    assert str(found).startswith(shown)
    assert f"on 3 items, {found.model}; falls on {found.anti_steerable:.0%}" in str(found)


def test_other_weights_are_named_once_and_doses_measured_anew(other, plan):
    with pytest.warns(UserWarning, match="not on") as caught:
        found = transfer(other, plan, HERE, DOSES)
    assert len(caught) == 1
    assert "made on" in found.notes[0]
    assert found.weights_hash == other.info.weights_hash
    vector = plan.edits[0].vector
    own = sl.SteeringVector(vector.values, vector.hook_point)  # without a card the dose is measured where it runs
    same = transfer(other, sl.Plan(sl.add(own, dose=1.0)), HERE, DOSES)
    assert found.slope == pytest.approx(same.slope, abs=1e-4)


def test_other_processing_is_named(tiny_llama_engine, plan):
    vector = plan.edits[0].vector
    card = type(vector.card)(**{**vars(vector.card), "weight_processing": "compatibility_mode"})
    processed = sl.Plan(sl.add(sl.SteeringVector(vector.values, vector.hook_point, card), dose=1.0))
    with pytest.warns(UserWarning, match="weight processing 'compatibility_mode'"):
        found = transfer(tiny_llama_engine, processed, HERE, DOSES)
    assert "weight processing" in found.notes[0]


def test_another_hook_point_is_named(tiny_llama_engine, plan):
    moved = plan.with_vectors(lambda vector: vector.at(2))
    with pytest.warns(UserWarning, match=r"extracted at blocks\.1\.hook_resid_post and is applied at blocks\.2"):
        transfer(tiny_llama_engine, moved, HERE, DOSES)


def test_another_width_is_refused(tiny_llama_engine):
    narrow = sl.SteeringVector.from_tensor(torch.ones(32), layer=1)
    with pytest.raises(VectorShapeError, match=r"\[32\].*\[64\]"):
        transfer(tiny_llama_engine, sl.Plan(sl.add(narrow, dose=1.0)), HERE, DOSES)


def test_comparison_with_the_source(tiny_llama_engine, plan, other):
    source = transfer(tiny_llama_engine, plan, HERE, DOSES)
    elsewhere = transfer(tiny_llama_engine, plan, THERE, DOSES)
    with pytest.warns(UserWarning, match="About"):
        moved = transfer(other, plan, HERE, DOSES)
    table = compare_transfers({"source": source, "data": elsewhere, "model": moved})
    assert table.name.tolist() == ["source", "data", "model"]
    assert table.retained.tolist() == [1.0, elsewhere.slope / source.slope, moved.slope / source.slope]
    assert table.on_hash.tolist() == [HERE.hash, THERE.hash, HERE.hash]
    assert table.notes.tolist() == ["", "", moved.notes[0]]
    nothing = transfer(tiny_llama_engine, plan, HERE, DOSES, metric=lambda positive, negative: 1.0)
    assert math.isnan(compare_transfers({"none": nothing}).retained[0])
