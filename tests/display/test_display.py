"""Faces: what they show, that markup in texts stays text, and that every colour can be read on."""

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerlab.display import Face, Fold, Scale, Table, diverging, figure, sequential, tokens
from steerlab.display.colors import contrast, text_on

EVIL = '<script>alert("x")</script> & <b title="y">'


class Reader(HTMLParser):
    """The visible text and the tags of a fragment; fails if they are not balanced."""

    def __init__(self, fragment):
        super().__init__()
        self.text, self.tags, self.open, self.titles = "", [], [], []
        self.feed(fragment)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [tag] * (tag != "img")
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


@given(st.floats(-1e6, 1e6), st.booleans())
def test_text_on_every_colour_can_be_read(value, is_diverging):
    scale = diverging([value, 3.0]) if is_diverging else sequential([value, 3.0])
    background = scale.rgb(value)
    ink = {"#000": (0.0, 0.0, 0.0), "#fff": (1.0, 1.0, 1.0)}[text_on(background)]
    assert contrast(background, ink) >= 4.5


def test_a_scale_may_end_at_zero():
    scale = Scale(-3.0, 0.0, True)
    assert scale.rgb(0.0) == scale.rgb(2.0) == (1.0, 1.0, 1.0)
    assert scale.rgb(-3.0) == diverging([3.0]).rgb(-3.0)


def test_zero_has_no_colour_and_the_ends_are_far_apart():
    scale = diverging([-2.0, 1.0])
    assert scale.rgb(0.0) == (1.0, 1.0, 1.0)
    assert scale.rgb(-2.0) == scale.rgb(-50.0)
    assert np.abs(np.subtract(scale.rgb(-2.0), scale.rgb(2.0))).max() > 0.5
    assert scale.rgb(math.nan) is None
    assert (diverging([]).high, diverging([0.0]).high) == (1.0, 1.0)
    assert (sequential([]).low, sequential([math.nan, 4.0]).low) == (0.0, 3.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04762, "0.0476"),
        (999.96, "1000"),
        (0.0, "0.00"),
        (-0.5, "−0.500"),
        (0.99999, "1.00"),
        (12345, "12 345"),
        (2e7, "2.00e+07"),
    ],
)
def test_figures_have_sensible_digits(value, text):
    assert figure(value) == text


def test_markup_in_texts_stays_text():
    view = tokens([EVIL, " b"], [1.0, math.nan], label=EVIL, unit=EVIL, names=None)
    face = Face(EVIL, [Table([EVIL], [[EVIL]], more=EVIL, limit=1), Fold(EVIL, [view])], [EVIL])
    for fragment in (face.html(), view._repr_html_()):
        read = Reader(fragment)
        assert "script" not in read.tags
        assert "b" not in read.tags
        assert EVIL in read.text


def test_tokens_are_coloured_with_exact_values_on_hover():
    view = tokens([["The", " cat"], ["A", "\n"]], [[0.5, -1.25], [2.0, math.nan]], unit="nats", names=["a", "b"])
    read = Reader(view._repr_html_())
    assert "The cat" in read.text
    assert read.titles == ["0.5000 nats", "−1.250 nats", "2.000 nats"]
    assert "⏎" in read.text
    assert repr(view) == "TokenView(value, 2 texts, 4 tokens)"


def test_a_thousand_tokens_are_small_and_folded():
    view = tokens([f" tok{k}" for k in range(1000)], np.linspace(-5, 5, 1000), label="log p", unit="nats")
    found = view._repr_html_()
    assert len(found.encode()) < 300_000
    assert "<details>" in found
    assert "<details>" not in tokens(["a"], [1.0])._repr_html_()


def test_nothing_is_asked_of_a_network():
    found = tokens(["a", "b"], [1.0, -1.0])._repr_html_()
    assert not re.search(r"https?:|url\(|<link|<script|@import", found)


def test_a_long_table_says_what_it_leaves_out():
    read = Reader(Face("t", [Table(["x"], [[k] for k in range(60)], more=".to_frame()")]).html())
    assert "… and 10 more; .to_frame() has all" in read.text


@pytest.mark.parametrize(
    ("texts", "values", "options"),
    [
        (["a"], [1.0, 2.0], {}),
        ([["a"], ["b"]], [[1.0]], {}),
        (["a"], [1.0], {"names": ["x", "y"]}),
        (["a"], [1.0], {"scale": "rainbow"}),
    ],
)
def test_what_does_not_match_is_an_error(texts, values, options):
    with pytest.raises(ValueError, match=r"texts|tokens|scale"):
        tokens(texts, values, **options)
