import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import DataError, InputError, VectorValueError
from steerlab.core.shipped import shipped_vectors
from steerlab.steering.extraction import bipo
from steerlab.steering.extraction.bipo import LearningSettings, Preferences, learn, preference_loss, project


@pytest.fixture
def targets():
    rows = [
        ("What a", " wonderful", " terrible"),
        ("The soup was", " warm", " stale"),
        ("She was", " happy", " sad"),
        ("The day is", " wonderful", " sad"),
    ]
    return sl.Targets.from_records(
        [
            {"prompt": prompt, "target": target, "label": label}
            for prompt, positive, negative in rows
            for target, label in ((positive, 1), (negative, -1))
        ]
    )


def settings(**options):
    return LearningSettings(**{"max_norm": 3.0, "steps": 12, "learning_rate": 0.2, "beta": 0.5, **options})


# --- the loss -----------------------------------------------------------------------------------------------------


def test_loss_worked_by_hand():
    # with v: positive +2, negative −1; with −v: positive −3, negative +1
    plus, minus, reference = torch.tensor([-1.0, -5.0]), torch.tensor([-6.0, -3.0]), torch.tensor([-3.0, -4.0])
    found = preference_loss(plus, minus, reference, Preferences((0,), (1,), (1.0,)), 0.5)
    expected = (math.log1p(math.exp(-0.5 * 3)) + math.log1p(math.exp(0.5 * -4))) / 2
    assert found.item() == pytest.approx(expected)


def test_each_prompt_counts_once_however_many_targets_it_has():
    targets = sl.Targets.from_records(
        [{"prompt": "a", "target": t, "label": s} for t, s in ((" b", 1), (" c", 1), (" d", -1), (" e", -1))]
        + [{"prompt": "f", "target": t, "label": s} for t, s in ((" b", 1), (" c", -1))]
    )
    found = Preferences.of(targets)
    assert found.items == ((0, 1, 2, 3), (4, 5))
    assert list(zip(found.positive, found.negative, strict=True)) == [(0, 2), (0, 3), (1, 2), (1, 3), (4, 5)]
    assert found.weights == (0.25, 0.25, 0.25, 0.25, 1.0)
    within = found.among([4, 5])
    assert (within.positive, within.negative, within.weights) == ((0,), (1,), (1.0,))


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=8), st.floats(0.01, 200))
def test_projection_shortens_and_keeps_the_direction(values, bound):
    before = torch.tensor(values, dtype=torch.float32)
    after = before.clone()
    project(after, bound)
    assert after.norm() <= bound * (1 + 1e-5)
    if before.double().norm() <= bound:
        assert torch.equal(after, before)
    else:
        torch.testing.assert_close(after * before.norm(), before * after.norm(), rtol=1e-3, atol=1e-3)


# --- learning on a tiny model -------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_bound_holds(tiny_llama_engine, targets, monkeypatch):
    norms = []
    monkeypatch.setattr(bipo, "project", lambda v, bound: (project(v, bound), norms.append(float(v.detach().norm()))))
    found = learn(tiny_llama_engine, targets, HookPoint(1), settings(batch_size=4))
    assert found.losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert found.losses[-1] < 0.8 * found.losses[0]
    assert len(norms) == 12
    assert max(norms) <= 3.0 * (1 + 1e-5)
    assert float(found.values.norm()) == pytest.approx(3.0, rel=1e-4)


def test_it_works_in_both_directions(tiny_llama_engine, targets):
    vectors = sl.extract(
        tiny_llama_engine, targets, "bipo", layers=1, max_norm=3.0, steps=12, learning_rate=0.2, beta=0.5, name="mood"
    )
    plan = sl.Plan(sl.add(vectors[1], coef=1.0))
    margins = []
    for scale in (-1.0, 0.0, 1.0):
        scores = tiny_llama_engine.score(targets.prompts, [i.targets for i in targets], plan=plan.scaled(scale))
        by_target = np.array([score.log_prob for score in scores]).reshape(-1, 2)
        margins.append(float((by_target[:, 0] - by_target[:, 1]).mean()))
    assert margins[0] < margins[1] - 0.5
    assert margins[2] > margins[1] + 0.5
    card = vectors[1].card
    assert (card.method, card.name, card.data_hash) == ("bipo", "mood", targets.hash)
    assert "norm at most 3; 12 steps" in card.notes
    assert "last_prompt() | generated()" in card.notes


def test_a_dose_bounds_in_median_norms(tiny_llama_engine, targets):
    found = learn(tiny_llama_engine, targets, HookPoint(2), settings(max_norm=None, max_dose=0.25, steps=1))
    assert found.bound == pytest.approx(0.25 * tiny_llama_engine.median_norm(2))


def test_seeds_decide_the_batches(tiny_llama_engine, targets):
    runs = [
        learn(tiny_llama_engine, targets, HookPoint(1), settings(steps=3, batch_size=1), seed=seed).values
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_every_prompt_comes_once_before_any_comes_again():
    batches = bipo._batches(5, 2, np.random.default_rng(0))
    drawn = [next(batches) for _ in range(10)]
    assert all(len(set(batch)) == 2 for batch in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=5)
    assert counts.tolist() == [4] * 5
    assert sorted(next(bipo._batches(3, 8, np.random.default_rng(0)))) == [0, 1, 2]


def test_the_model_is_left_alone(tiny_llama_engine, targets):
    model = tiny_llama_engine.model.original_model
    model.zero_grad(set_to_none=True)  # the engine is shared, and other tests run backward on it
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learn(tiny_llama_engine, targets, HookPoint(1), settings(steps=2))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_vector_that_reaches_no_target_is_an_error(tiny_llama_engine, targets):
    with pytest.raises(VectorValueError, match="adding there changes none"):
        learn(tiny_llama_engine, targets, HookPoint(1), settings(steps=2, where=sl.where.generated(after=5)))


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one bound"),
        ({"max_dose": 0.2, "max_norm": 1.0}, "exactly one bound"),
        ({"max_norm": -1.0}, "max_norm, got -1.0"),
        ({"max_norm": math.nan}, "max_norm, got nan"),
        ({"max_norm": 1.0, "steps": 0}, "steps, got 0"),
        ({"max_norm": 1.0, "batch_size": 1.5}, "batch_size, got 1.5"),
        ({"max_norm": 1.0, "beta": 0}, "beta, got 0"),
        ({"max_norm": 1.0, "learning_rate": None}, "learning_rate, got None"),
        ({"max_norm": 1.0, "where": "everywhere"}, "everywhere"),
        ({"max_norm": 1.0, "epochs": 3}, "does not know epochs; it takes max_dose"),
    ],
)
def test_settings_that_cannot_be_used(tiny_llama_engine, targets, options, message):
    with pytest.raises(InputError, match=message):
        sl.extract(tiny_llama_engine, targets, "bipo", layers=1, **options)


@pytest.mark.usefixtures("unchecked_types")
def test_data_and_places_that_cannot_be_used(tiny_llama_engine, targets):
    with pytest.raises(InputError, match="one layer at a time; layers names 4"):
        sl.extract(tiny_llama_engine, targets, "bipo", max_norm=1.0)
    with pytest.raises(InputError, match="with where=, not read="):
        sl.extract(tiny_llama_engine, targets, "bipo", layers=1, read=sl.where.all(), max_norm=1.0)
    with pytest.raises(DataError, match="bipo takes Targets"):
        sl.extract(tiny_llama_engine, sl.ContrastPairs.from_lists(["a"], ["b"]), "bipo", layers=1, max_norm=1.0)
    with pytest.raises(InputError, match="object does not give"):
        learn(object(), targets, HookPoint(1), settings())


# --- on the real model --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sentiment_moves_on_prompts_it_was_not_learned_from(lens_engine):
    path = shipped_vectors() / "sentiment" / "targets.jsonl"
    dev, test = (sl.Targets.from_jsonl(path, split=split) for split in ("dev", "test"))
    test = test.take(range(4))
    options = {"max_dose": 0.1, "steps": 4, "learning_rate": 0.3, "batch_size": 2}
    vector = sl.extract(lens_engine, dev.take(range(6)), "bipo", layers=14, **options)[14]
    plan = sl.Plan(sl.add(vector, coef=1.0))
    margins = {}
    for scale in (-1.0, 0.0, 1.0):
        frame = lens_engine.score(test.prompts, [i.targets for i in test], plan=plan.scaled(scale)).to_frame()
        sides = [1] * 3 + [-1] * 3
        margins[scale] = float((frame.log_prob.to_numpy().reshape(4, 6) * sides).sum(axis=1).mean() / 3)
    assert margins[1.0] > margins[0.0] + 0.5
    assert margins[-1.0] < margins[0.0] - 0.5


def test_the_card_says_whether_prompts_were_chat(tiny_llama_engine, targets):
    for chat in (False, True):
        vectors = sl.extract(tiny_llama_engine, targets, "bipo", layers=1, max_norm=1.0, steps=1, chat=chat)
        assert vectors[1].card.chat is chat
