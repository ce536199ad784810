"""Projections of texts and of pairs: against the activations themselves."""

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.engines.toy import ToyEngine
from tests.display.test_display import EVIL, Reader

PAIRS = sl.ContrastPairs.from_lists(["good day", "so nice", "great"], ["bad day", "so poor", "awful"])


@pytest.fixture(scope="module")
def engine():
    return ToyEngine()


@pytest.fixture(scope="module")
def vectors(engine):
    return sl.extract(engine, PAIRS, read=sl.where.all())


def test_a_text_on_a_set_layer_by_layer(engine, vectors):
    found = sl.project_text(engine, "The cat", vectors)
    captured = engine.capture("The cat", layers="all")
    for k, layer in enumerate(found.layers):
        assert found.values[:, k] == pytest.approx((captured[layer] @ vectors[layer].unit).tolist(), rel=1e-4, abs=1e-5)
    assert found.to_frame().columns.tolist() == ["position", "token", 0, 1, 2]
    assert "".join(found.tokens) == "The cat"
    assert "7 tokens × 3 layers" in repr(found)


def test_one_vector_is_used_at_every_layer(engine, vectors):
    found = sl.project_text(engine, "ab", vectors[1], layers=[0, 2])
    captured = engine.capture("ab", layers=[0, 2])
    wanted = [(captured[layer] @ vectors[1].unit).tolist() for layer in (0, 2)]
    assert found.values.T.tolist() == pytest.approx(np.array(wanted), rel=1e-4, abs=1e-5)


def test_a_plan_is_active_meanwhile(engine, vectors):
    plan = sl.Plan(sl.add(vectors[1], coef=3.0, where=sl.where.all()))
    plain, steered = (sl.project_text(engine, "ab", vectors, layers=[1], plan=p) for p in (None, plan))
    assert (steered.values - plain.values).tolist() == pytest.approx(np.full((2, 1), 3 * vectors[1].norm), rel=1e-3)


def test_markup_is_shown_as_text(engine):
    v = sl.SteeringVector.from_tensor([1.0] * 32, layer=1, name=EVIL)
    for found in (sl.project_text(engine, EVIL, v), sl.project_pairs(engine, PAIRS, v)):
        read = Reader(found._repr_html_())
        assert {"script", "b"} & set(read.tags) == set()
        assert EVIL in read.text


def test_a_thousand_tokens_are_small(engine, vectors):
    found = ToyEngine(context_length=2048)
    shown = sl.project_text(found, "x" * 1000, vectors)._repr_html_()
    assert len(shown.encode()) < 300_000
    assert "more rows; .to_frame() has all" in Reader(shown).text


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (["a", "b"], {}, "one text"),
        ("a", {"layers": [5]}, "layer"),
        ("a", {"layers": [0]}, r"\[0\]; there are vectors"),
    ],
)
def test_what_cannot_be_projected_is_refused(engine, vectors, text, options, sentence):
    with pytest.raises(sl.SteerlabError, match=sentence):
        sl.project_text(engine, text, sl.VectorSet(vectors.by_layer[1:]), **options)


def test_both_sides_of_pairs(engine, vectors):
    found = sl.project_pairs(engine, PAIRS, vectors[2])
    for side, texts in ((found.positive, PAIRS.positives), (found.negative, PAIRS.negatives)):
        pooled = engine.capture(list(texts), layers=2, where=sl.where.all(), pool="mean")[2]
        assert side == pytest.approx((pooled @ vectors[2].unit).tolist(), rel=1e-4, abs=1e-5)
    order = (found.positive[:, None] > found.negative[None]).mean()
    assert found.auc == pytest.approx(order)
    assert found.ordered == (found.positive > found.negative).mean()
    assert found.to_frame().pair.tolist() == [0, 1, 2]
    read = Reader(found._repr_html_())
    assert "rect" in read.tags
    assert "positive" in read.text


def test_the_last_token_is_read_of_a_vector_that_was_given(engine):
    v = sl.SteeringVector.from_tensor(torch.linspace(-1, 1, 32), layer=0)
    found = sl.project_pairs(engine, PAIRS, v)
    last = engine.capture(list(PAIRS.positives), layers=0, where=sl.where.last_prompt())[0]
    assert found.positive == pytest.approx((last @ v.unit).tolist(), rel=1e-4, abs=1e-5)


def test_pairs_must_be_pairs(engine, vectors):
    with pytest.raises(sl.DataError, match="ContrastPairs"):
        sl.project_pairs(engine, ["a"], vectors[1])
