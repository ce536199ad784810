"""The faces of what an engine returns."""

import pytest

import steerlab as sl
from steerlab.core.results import Completion, Generations
from steerlab.engines.toy import ToyEngine
from tests.display.test_display import EVIL, Reader


@pytest.fixture(scope="module")
def engine():
    return ToyEngine()


@pytest.fixture(scope="module")
def plan():
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor([1.0] * 32, layer=1, name=EVIL), coef=1.0))


def test_generations(engine, plan):
    made = engine.generate([EVIL, "b"], n=2, max_new_tokens=3, plan=plan)
    assert repr(made) == "Generations(4 completions of 2 prompts on toy)"
    read = Reader(made._repr_html_())
    assert "edited tokens" in read.text
    assert EVIL in read.text  # the vector's name, in the receipts
    assert "script" not in read.tags
    assert "edited tokens" not in Reader(engine.generate("b", max_new_tokens=1)._repr_html_()).text


def test_scores(engine, plan):
    scores = engine.score(["a", "b"], [["x", "y"], ["z"]], plan=plan)
    assert repr(scores) == "Scores(3 targets of 2 prompts, float32)"
    assert repr(engine.score("a", ["x"])).startswith("Scores(1 target of 1 prompt, log p −")
    read = Reader(scores._repr_html_())
    assert "bits per byte" in read.text
    assert "variant" not in read.text
    assert "variant" in Reader(engine.score("a", ["x"], variants=("", EVIL))._repr_html_()).text


def test_activations(engine):
    found = engine.capture(["abc", "de"], layers=[0, 2])
    assert repr(found) == "Activations(resid_post of layers 0, 2, 2 prompts, 5 positions)"
    assert "5 × 32" in Reader(found._repr_html_()).text
    assert "mean of positions" in repr(engine.capture("abc", layers=1, pool="mean"))


def test_a_thousand_completions_show_the_first():
    rows = tuple(Completion(EVIL * 5, [1] * 50, "length", k, 0, [-1.0] * 50, [-1.0] * 50) for k in range(1000))
    found = Generations(rows, ((1,),) * 1000)._repr_html_()
    assert len(found) < 300_000
    assert "… and 950 more" in Reader(found).text
