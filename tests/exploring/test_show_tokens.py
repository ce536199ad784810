"""Coloured tokens: each value is what the engine says by other means."""

import math

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.engines.toy import ToyEngine
from tests.display.test_display import EVIL, Reader

TEXTS = ["The cat sat", "on"]


@pytest.fixture(scope="module")
def engine():
    return ToyEngine()


@pytest.fixture(scope="module")
def vector():
    return sl.SteeringVector.from_tensor(torch.arange(1.0, 33.0), layer=1, name="slope")


def test_log_probs_are_the_scores(engine):
    view = sl.show_tokens(engine, TEXTS)
    for text, row in zip(TEXTS, view.rows, strict=True):
        (score,) = engine.score(
            [[*engine.tokenizer(text)["input_ids"]][:1]], [[engine.tokenizer(text)["input_ids"][1:]]]
        )
        assert math.isnan(row.values[0])
        assert row.values[1:] == pytest.approx(score.token_log_probs)
        assert "".join(row.tokens) == text
    assert view.scale.high == 0.0


def test_a_plan_shows_its_change(engine, vector):
    plan = sl.Plan(sl.add(vector, coef=0.5))
    view = sl.show_tokens(engine, TEXTS, plan=plan)
    steered, plain = (sl.show_tokens(engine, TEXTS, plan=p, value="log_prob") for p in (plan, None))
    for row, a, b in zip(view.rows, steered.rows, plain.rows, strict=True):
        assert row.values[1:] == pytest.approx(np.subtract(a.values, b.values)[1:])
    assert np.abs(view.rows[0].values[1:]).max() > 0.1
    assert "steered − unsteered" in view.label


def test_projections_are_those_of_the_activations(engine, vector):
    view = sl.show_tokens(engine, TEXTS, vector=vector)
    found = engine.capture(TEXTS, layers=1)
    for index, row in enumerate(view.rows):
        assert row.values == pytest.approx((found.of(index, 1) @ vector.unit).tolist(), rel=1e-5)
    assert "projection on slope" in repr(view)
    largest = max(abs(value) for row in view.rows for value in row.values[1:])
    assert view.scale.high == pytest.approx(largest)  # the first token's is not counted


def test_entropies_lie_between_zero_and_that_of_chance(engine):
    (row,) = sl.show_tokens(engine, "abcdef", value="entropy").rows
    assert all(0 <= value <= math.log(engine.info.d_vocab) for value in row.values[1:])


def test_divergences_are_those_of_the_distributions(engine, vector):
    plan = sl.Plan(sl.add(vector, coef=0.5))
    view = sl.show_tokens(engine, TEXTS, plan=plan, value="kl")
    for text, row in zip(TEXTS, view.rows, strict=True):
        assert row.values[1:] == pytest.approx(sl.divergence(engine, engine, text, plan_a=plan).kl.tolist())
    assert view.scale.low == 0.0


def test_edits_are_those_of_the_receipt(engine, vector):
    plan = sl.Plan(sl.add(vector, coef=0.5), sl.ablate(vector, where=sl.where.generated(after=2)))
    view = sl.show_tokens(engine, TEXTS[0], plan=plan, value="edited")
    ids = engine.tokenizer(TEXTS[0])["input_ids"]
    receipt = engine.score([ids[:1]], [[ids[1:]]], plan=plan).receipts[0]
    assert sum(view.rows[0].values) == receipt.edited
    assert view.unit == "edits"


def test_texts_can_be_named_and_aligned(engine):
    view = sl.show_tokens(engine, ["The cat", "The dog"], names=["a", "b"], aligned=True)
    read = Reader(view._repr_html_())
    assert "abTThhee" in read.text
    assert read.tags.count("span") == 2 + 7  # the legend's bar, the names, and the tokens
    assert read.tags.count("i") == 14


def test_markup_is_shown_as_text(engine, vector):
    named = sl.SteeringVector.from_tensor(vector.values, layer=1, name=EVIL)
    read = Reader(sl.show_tokens(engine, EVIL, vector=named)._repr_html_())
    assert "script" not in read.tags
    assert EVIL in read.text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"value": "heat"}, "value is one of"),
        ({"value": "projection"}, "needs vector="),
        ({"value": "delta_log_prob"}, "needs plan="),
        ({"value": "kl"}, "kl needs plan="),
        ({"value": "edited"}, "edited needs plan="),
    ],
)
def test_what_is_missing_is_named(engine, options, sentence):
    with pytest.raises(sl.InputError, match=sentence):
        sl.show_tokens(engine, "abc", **options)


def test_a_single_token_has_no_prediction(engine):
    with pytest.raises(sl.PromptError, match="one token"):
        sl.show_tokens(engine, "a")
    assert len(sl.show_tokens(engine, "a", vector=sl.SteeringVector.from_tensor([1.0] * 32, layer=0)).rows) == 1
