"""Plots of frames: layers and doses, entropy, tokens, vectors. Data, labels and limits, not pixels."""

import io
import itertools
from collections.abc import Iterator
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import steerlab as sl
from steerlab.core.errors import DataError
from steerlab.core.results import Score
from steerlab.experiment import plots
from steerlab.experiment.plots._palette import PALE
from steerlab.experiment.plots.token_differences import place_tokens


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


# --- layer × dose -------------------------------------------------------------------------------------------------

GRID = pd.DataFrame(
    [(3, -0.1, -2.0), (3, 0.1, 1.0), (7, -0.1, 0.0), (7, 0.1, 4.0), (9, 0.1, np.nan)],
    columns=["layer", "dose", "value"],
)


def test_cells_are_centred_at_zero() -> None:
    ax = plots.plot_layer_dose(GRID)
    (image,) = ax.get_images()
    np.testing.assert_allclose(image.get_array().filled(np.nan), [[-2, 1], [0, 4], [np.nan, np.nan]])
    assert (image.norm.vmin, image.norm.vmax) == (-4, 4)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3", "7", "9"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["−0.1", "0.1"]
    assert ax.get_title(loc="left") == "Strongest at layer 7, dose 0.1"


def test_few_values_are_printed_and_many_are_not() -> None:
    printed = [text.get_text() for text in plots.plot_layer_dose(GRID).texts]
    assert printed == ["−2.0", "+1.0", "0", "+4.0"]
    many = pd.DataFrame([(i, d / 10, i * d) for i in range(21) for d in (-1, 0, 1)], columns=["layer", "dose", "value"])
    assert not plots.plot_layer_dose(many).texts


def test_a_cell_with_two_rows_is_refused() -> None:
    with pytest.raises(DataError, match="one row per layer and dose"):
        plots.plot_layer_dose(pd.concat([GRID, GRID]))


def test_a_grid_of_zeros_or_without_values_is_drawn() -> None:
    plots.plot_layer_dose(GRID.assign(value=0.0))
    assert plots.plot_layer_dose(GRID.assign(value=np.nan)).get_title(loc="left") == "No values"
    assert "No cell" in plots.describe_layer_dose(GRID.assign(value=np.nan))
    assert "+4.00, at layer 7 and dose 0.1" in plots.describe_layer_dose(GRID)


# --- entropy ------------------------------------------------------------------------------------------------------


def entropies(length: int = 6) -> pd.DataFrame:
    one = pd.DataFrame({"text": 0, "position": np.arange(1, length + 1), "base": 1.0, "steered": 2.0, "kl": 0.5})
    two = one.iloc[:2].assign(text=1, base=3.0, steered=5.0, kl=[np.inf, 1.5])
    return pd.concat([one, two], ignore_index=True)


def test_both_arms_are_means_over_texts() -> None:
    ax = plots.plot_entropy(entropies())
    drawn = {line.get_label(): line for line in ax.get_lines()}
    np.testing.assert_allclose(drawn["unsteered"].get_ydata(), [2, 2, 1, 1, 1, 1])
    np.testing.assert_allclose(drawn["steered"].get_ydata(), [3.5, 3.5, 2, 2, 2, 2])
    assert drawn["unsteered"].get_linestyle() != drawn["steered"].get_linestyle()
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylabel() == "entropy (nats)"


def test_the_divergence_lies_below_and_marks_infinities() -> None:
    ax = plots.plot_entropy(entropies())
    (panel,) = [other for other in ax.figure.axes if other is not ax]
    curve, marks = panel.get_lines()
    np.testing.assert_allclose(curve.get_ydata(), [0.5, 1.0, 0.5, 0.5, 0.5, 0.5])
    assert marks.get_xdata().tolist() == [1]
    assert panel.get_ylabel() == "KL (nats)"
    assert panel.get_xlabel() == "position in the text"
    assert panel.get_position().y1 <= ax.get_position().y0


@pytest.mark.parametrize("free", [True, False])
def test_the_panel_stays_within_the_place_of_the_axes_given(free: bool) -> None:
    figure = plt.figure()
    ax = figure.add_axes((0.2, 0.2, 0.6, 0.6)) if free else figure.add_subplot(1, 2, 1)
    before = ax.get_position()
    assert plots.plot_entropy(entropies(), ax) is ax
    panel = figure.axes[1]
    assert panel.get_position().y0 == pytest.approx(before.y0)
    assert ax.get_position().y1 == pytest.approx(before.y1)
    assert panel.get_position().y1 < ax.get_position().y0
    assert panel.get_position().x1 == pytest.approx(before.x1)


def test_without_a_divergence_there_is_one_panel() -> None:
    ax = plots.plot_entropy(entropies().drop(columns="kl"))
    assert len(ax.figure.axes) == 1
    assert "KL" not in plots.describe_entropy(entropies().drop(columns="kl"))


def test_long_texts_are_smoothed_and_it_is_said() -> None:
    frame = entropies(200)
    ax = plots.plot_entropy(frame)
    assert "running mean over 5" in ax.figure.axes[1].get_xlabel()
    assert len(ax.get_lines()) == 4


def test_entropy_in_words() -> None:
    text = plots.describe_entropy(entropies())
    assert "mean entropy is 1.500 nats unsteered and 2.750 steered (+1.250)" in text
    assert "infinite at 1 of them" in text


# --- tokens -------------------------------------------------------------------------------------------------------

TOKENS = pd.DataFrame({"token": ["A", " <good>", "\nday"], "base": [-1.0, -2.0, -3.0], "steered": [-1.0, -1.0, -5.0]})


def test_each_token_lies_on_its_change() -> None:
    ax = plots.plot_token_differences(TOKENS)
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle) and str(patch.get_gid()).startswith("token")]
    assert [box.get_gid() for box in boxes] == ["token-0", "token-1", "token-2", "token-2"]
    assert to_hex(boxes[0].get_facecolor()) == to_hex(PALE(0.5))
    assert to_hex(boxes[1].get_facecolor()) == to_hex(PALE(0.75))
    assert to_hex(boxes[3].get_facecolor()) == to_hex(PALE(0.0))
    shown = "".join(text.get_text() for text in ax.texts)
    assert shown.startswith("A <good>↵day")
    assert ax.get_title(loc="left") == "log p of the text changes by −1.00 nats"


def test_what_became_less_likely_is_underlined() -> None:
    ax = plots.plot_token_differences(TOKENS)
    assert len(ax.get_lines()) == 2  # both parts of the third token
    assert "text-decoration:underline" in plots.token_differences_html(TOKENS).split("<span")[3]
    assert "text-decoration" not in plots.token_differences_html(TOKENS).split("<span")[2]


def test_characters_that_the_font_lacks_are_marked_and_the_fragment_keeps_them() -> None:
    frame = TOKENS.assign(token=["Ü $x$", " 東京", "\U0001f600"])
    ax = plots.plot_token_differences(frame)
    ax.figure.savefig(io.BytesIO())  # a missing glyph would warn
    assert [text.get_text() for text in ax.texts][:3] == [r"Ü \$x\$", " ��", "�"]
    boxes = [patch for patch in ax.patches if str(patch.get_gid()).startswith("token")]
    assert [box.get_width() for box in boxes] == [5, 5, 2]
    assert "東京" in plots.token_differences_html(frame)


class Spans(HTMLParser):
    """Collects titles, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.grounds: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        styles = [str(value) for name, value in attrs if name == "style" and tag == "span"]
        self.grounds += [style.removeprefix("background:")[:7] for style in styles]
        self.titles += [str(value) for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_fragment_escapes_text_and_has_tooltips() -> None:
    found = Spans(plots.token_differences_html(TOKENS))
    assert found.text == "A <good>↵\nday"
    assert found.tags == ["p", "span", "span", "span"]
    assert found.titles[1] == "log p −2.00 → −1.00 (+1.00 nats)"
    assert found.grounds == [to_hex(PALE(0.5)), to_hex(PALE(0.75)), to_hex(PALE(0.0))]


def test_a_limit_sets_where_the_colour_is_full() -> None:
    found = Spans(plots.token_differences_html(TOKENS, limit=4.0))
    assert found.grounds == [to_hex(PALE(0.5)), to_hex(PALE(0.625)), to_hex(PALE(0.25))]


def test_missing_log_probs_are_grey_not_zero() -> None:
    frame = TOKENS.assign(steered=[np.nan, -1.0, -5.0])
    ax = plots.plot_token_differences(frame)
    assert to_hex(ax.patches[0].get_facecolor()) == "#e4e4e4"
    assert "#e4e4e4" in plots.token_differences_html(frame)


def test_an_infinite_change_has_the_fullest_colour() -> None:
    frame = TOKENS.assign(steered=[-np.inf, -1.0, -5.0])
    assert to_hex(PALE(0.0)) in plots.token_differences_html(frame).split("<span")[1]
    plots.plot_token_differences(frame)


@given(st.lists(st.text(min_size=0, max_size=30), min_size=1, max_size=20), st.integers(4, 40))
def test_placed_tokens_lose_nothing_and_overlap_nowhere(tokens: list[str], width: int) -> None:
    pieces = place_tokens(tokens, width)
    for index, token in enumerate(tokens):
        text = "".join(piece.text for piece in pieces if piece.token == index)
        assert text == token.replace("\t", "→").replace("\n", "↵")
    taken = [(piece.line, piece.start, piece.start + piece.width) for piece in pieces]
    assert taken == sorted(taken)
    for (line, _, stop), (next_line, start, _) in itertools.pairwise(taken):
        assert next_line > line or start >= stop
    assert all(stop <= width or stop - start == 2 for _, start, stop in taken)


def test_a_frame_from_two_scores() -> None:
    base = Score(0, 0, (1, 2), (-1.0, -2.0), "clean")
    steered = Score(0, 0, (1, 2), (-0.5, -2.5), "clean")
    spell = {"decode": lambda self, ids, **_: "".join(f"<{token}>" for token in ids)}
    tokenizer = type("Tokenizer", (), spell)()
    frame = plots.token_frame(base, steered, tokenizer)
    assert frame.token.tolist() == ["<1>", "<2>"]
    assert frame.difference.tolist() == [0.5, -0.5]
    with pytest.raises(DataError, match="different tokens, 2 and 1"):
        plots.token_frame(base, Score(0, 0, (1,), (-1.0,), "clean"), tokenizer)


def test_tokens_in_words() -> None:
    text = plots.describe_token_differences(TOKENS)
    assert "Over 3 tokens log p changes by −1.00 nats" in text
    assert "“<good>” (+1.00)" in text
    assert "“day” (−2.00)" in text


# --- vectors ------------------------------------------------------------------------------------------------------


def vector(values: list[float], layer: int, name: str | None = None) -> sl.SteeringVector:
    return sl.SteeringVector.from_tensor(torch.tensor(values), layer=layer, name=name)


SET = sl.VectorSet((vector([3.0, 0.0], 1), vector([0.0, 4.0], 2), vector([-5.0, 0.0], 5)))


def test_cosines_of_a_set_are_labelled_by_layer() -> None:
    cosines = plots.cosine_frame(SET)
    assert cosines.index.tolist() == [1, 2, 5]
    np.testing.assert_allclose(cosines.to_numpy(), [[1, 0, -1], [0, 1, 0], [-1, 0, 1]])
    ax = plots.plot_cosines(cosines)
    np.testing.assert_allclose(ax.get_images()[0].get_array(), cosines.to_numpy())
    assert (ax.get_images()[0].norm.vmin, ax.get_images()[0].norm.vmax) == (-1, 1)
    assert ax.get_xlabel() == "layer"
    assert [text.get_text() for text in ax.texts][:3] == ["1.00", "0.00", "−1.00"]


def test_named_vectors_keep_their_names() -> None:
    cosines = plots.cosine_frame([vector([1.0, 0.0], 3, "kind"), vector([1.0, 1.0], 4)])
    assert cosines.index.tolist() == ["kind L3", "vector L4"]
    ax = plots.plot_cosines(cosines)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["kind L3", "vector L4"]
    assert ax.get_xlabel() == ""
    assert plots.cosine_frame({"a": vector([1.0, 0.0], 3)}).columns.tolist() == ["a"]


def test_vectors_of_two_widths_are_refused() -> None:
    with pytest.raises(DataError, match=r"\[2, 3\]"):
        plots.cosine_frame([vector([1.0, 0.0], 0), vector([1.0, 0.0, 0.0], 1)])
    with pytest.raises(DataError, match="square"):
        plots.plot_cosines(pd.DataFrame([[1.0, 0.0]]))


def test_norms_by_layer() -> None:
    frame = plots.norm_frame(SET)
    assert frame.norm.tolist() == [3, 4, 5]
    ax = plots.plot_norms(frame.assign(median_norm=[10.0, 20.0, np.nan]))
    drawn = {line.get_label(): line for line in ax.get_lines()}
    assert drawn["vector"].get_xdata().tolist() == [1, 2, 5]
    assert drawn["median of the stream"].get_ydata()[0] == 10
    assert ax.get_yscale() == "log"
    assert len(plots.plot_norms(frame).get_lines()) == 1  # no median is known


def test_vectors_in_words() -> None:
    assert plots.describe_cosines(plots.cosine_frame(SET)) == (
        "Among 3 vectors the largest cosine is +0.00 (1 and 2); the smallest cosine is −1.00 (1 and 5)."
    )
    assert plots.describe_norms(plots.norm_frame(SET)) == "Norms run from 3 at layer 1 to 5 at layer 5."
    assert "one vector" in plots.describe_cosines(plots.cosine_frame({"a": vector([1.0, 0.0], 0)}))
