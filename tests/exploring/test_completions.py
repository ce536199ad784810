"""Completions side by side, and the slider."""

import sys

import pytest

import steerlab as sl
from steerlab.engines.toy import ToyEngine
from tests.display.test_display import EVIL, Reader


@pytest.fixture(scope="module")
def engine():
    return ToyEngine()


@pytest.fixture(scope="module")
def plan():
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor([1.0] * 32, layer=1), coef=1.0))


@pytest.fixture(scope="module")
def arms(engine, plan):
    return [engine.generate([EVIL, "b"], n=2, seed=3, plan=p, max_new_tokens=8) for p in (None, plan)]


def test_arms_stand_beside_each_other_by_prompt_and_sample(arms):
    found = sl.side_by_side(*arms, prompts=[EVIL, "b"])
    assert found.columns == ("unsteered", "steered")
    assert [row.texts for row in found.rows] == list(zip(arms[0].texts, arms[1].texts, strict=True))
    read = Reader(found._repr_html_())
    assert "mark" in read.tags
    assert {"script", "b"} & set(read.tags) == set()
    assert EVIL in read.text
    assert "mark" not in Reader(sl.side_by_side(arms[0], arms[0])._repr_html_()).tags


def test_three_arms_are_numbered_or_named(arms):
    assert sl.side_by_side(*arms, arms[0]).columns == ("1", "2", "3")
    assert sl.side_by_side(*arms, arms[0], names=["a", "b", "c"]).columns == ("a", "b", "c")


def test_a_frame_of_an_experiment_has_a_column_per_dose(engine, plan):
    frame = sl.Experiment("side", engine, root=None).generate(plan, ["a", "b"], doses=[0.5, 0], n=2, max_new_tokens=3)
    found = sl.side_by_side(frame)
    assert found.columns == ("dose 0", "dose 0.5")
    assert found.rows[0].texts == tuple(frame[(frame.prompt_index == 0) & (frame.sample_index == 0)].text)
    with pytest.raises(sl.InputError, match="every dose"):
        sl.side_by_side(frame.iloc[1:])
    with pytest.raises(sl.InputError, match="'dose'"):
        sl.side_by_side(frame.drop(columns="dose"))


def test_what_does_not_belong_together_is_refused(engine, arms):
    with pytest.raises(sl.InputError, match="at least twice"):
        sl.side_by_side(arms[0])
    with pytest.raises(sl.InputError, match="different prompts"):
        sl.side_by_side(arms[0], engine.generate("b", max_new_tokens=1))
    with pytest.raises(sl.InputError, match="2 arms and 1 names"):
        sl.side_by_side(*arms, names=["a"])


def test_the_slider_completes_at_the_dose_it_shows(engine, plan):
    box = sl.dose_slider(engine, plan, "ab", low=-1, high=1, max_new_tokens=12)
    base = engine.generate("ab", max_new_tokens=12).texts[0]
    assert "mark" not in Reader(box.shown.value).tags
    box.dose.value = 1.0
    wanted = engine.generate("ab", plan=plan, max_new_tokens=12).texts[0]
    read = Reader(box.shown.value)
    assert base in read.text
    assert wanted in read.text
    assert "dose 1" in read.text
    box.prompt.value = ""
    assert box.shown.value == ""


def test_a_slider_needs_its_ends_in_order_and_its_library(engine, plan, monkeypatch):
    with pytest.raises(sl.InputError, match="low < high"):
        sl.dose_slider(engine, plan, low=1, high=-1)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(sl.BackendMissingError, match=r"steerlab\[notebooks\]"):
        sl.dose_slider(engine, plan)
