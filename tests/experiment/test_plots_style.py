"""The look: only inside our functions, and legible to everybody."""

import io
import itertools
from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from steerlab.experiment import plots
from steerlab.experiment._wording import axis_label, number
from steerlab.experiment.plots import _palette as palette
from steerlab.experiment.plots.style import direct_labels, style, styled
from tests.experiment.frames import make_effect

# Machado, Oliveira & Fernandes 2009, severity 1.0, on linear RGB
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
TOGETHER = [
    (palette.REAL, palette.RANDOM, palette.FLIPS, palette.ELSEWHERE),  # against the nulls
    (palette.REAL, palette.AGAINST),  # items, cost
    (palette.REAL, palette.BASE),  # both arms
]


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


def luminance(colour: str, *, seen_by_deuteranope: bool = False) -> float:
    """Relative luminance as WCAG defines it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    if seen_by_deuteranope:
        linear = np.clip(DEUTERANOPIA @ linear, 0, 1)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(first: str, second: str, **options: bool) -> float:
    low, high = sorted((luminance(first, **options), luminance(second, **options)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_the_known_one() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("deuteranope", [False, True])
@pytest.mark.parametrize("colours", TOGETHER, ids=["nulls", "items", "arms"])
def test_colours_that_meet_differ_in_luminance(colours: tuple[str, ...], deuteranope: bool) -> None:
    for first, second in itertools.combinations(colours, 2):
        assert contrast(first, second, seen_by_deuteranope=deuteranope) > 1.3, (first, second)


@pytest.mark.parametrize("deuteranope", [False, True])
def test_every_colour_stands_out_from_the_paper(deuteranope: bool) -> None:
    for colour in {colour for group in TOGETHER for colour in group}:
        assert contrast(colour, "#ffffff", seen_by_deuteranope=deuteranope) >= 3


def test_names_of_lines_are_legible_and_do_not_overlap() -> None:
    assert all(contrast(palette.readable(colour), "#ffffff") >= 4.5 for colour in plt.colormaps["tab10"].colors)
    assert palette.readable("#00457a") == "#00457a"
    _, ax = plt.subplots(figsize=(3.5, 2.7))
    ax.plot([0, 1], [0, 1])
    direct_labels(
        ax, [(1.0, "first\nof two lines", "#000000"), (0.99, "second", "#000000"), (0.98, "third", "#000000")]
    )
    ax.figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.y0)
    assert [low.y1 <= high.y0 for low, high in itertools.pairwise(boxes)] == [True, True]
    assert [text.get_text() for text in sorted(ax.texts, key=lambda t: t.get_window_extent().y0)][
        -1
    ] == "first\nof two lines"


@pytest.mark.parametrize("deuteranope", [False, True])
def test_text_on_coloured_tokens_is_legible(deuteranope: bool) -> None:
    for place in np.linspace(0, 1, 21):
        ground = mpl.colors.to_hex(palette.PALE(place))
        assert contrast(palette.INK, ground, seen_by_deuteranope=deuteranope) >= 4.5


def test_the_diverging_map_is_white_at_zero_and_equally_dark_on_both_sides() -> None:
    ends = [mpl.colors.to_hex(palette.DIVERGING(place)) for place in (0.0, 0.5, 1.0)]
    assert luminance(ends[1]) > 0.9
    assert luminance(ends[0]) == pytest.approx(luminance(ends[2]), abs=0.03)


def test_settings_of_the_caller_are_left_alone() -> None:
    with mpl.rc_context({"font.size": 17, "axes.grid": False}):
        before = dict(mpl.rcParams)
        ax = plots.plot_dose_response(make_effect([1.0, 2.0]))
        assert dict(mpl.rcParams) == before
    assert ax.xaxis.label.get_fontsize() == 8


def test_what_is_drawn_on_axes_given_is_in_our_style() -> None:
    with mpl.rc_context({"xtick.labelsize": 17, "lines.linewidth": 9}):
        _, ax = plt.subplots()
        plots.plot_dose_response(make_effect([1.0, 2.0]), ax)
    assert {text.get_fontsize() for text in ax.texts} == {7.5}
    assert next(line for line in ax.get_lines() if line.get_label() == "vector").get_linewidth() == 1.5


def test_settings_are_back_after_an_error() -> None:
    before = dict(mpl.rcParams)
    with pytest.raises(ZeroDivisionError), style():
        raise ZeroDivisionError
    assert dict(mpl.rcParams) == before


def test_axes_given_are_drawn_on_and_returned() -> None:
    _, ax = plt.subplots()
    for draw in (plots.plot_dose_response, plots.plot_item_slopes, plots.plot_null_slopes, plots.plot_cost):
        assert draw(make_effect([1.0, 2.0]), ax) is ax
        assert draw(make_effect([1.0, 2.0]), ax=ax) is ax
    assert len(plt.get_fignums()) == 1


def test_a_new_figure_is_one_column_wide() -> None:
    assert plots.plot_item_slopes(make_effect([1.0, 2.0])).figure.get_figwidth() == 3.5


def test_nothing_of_a_new_figure_is_cut_off() -> None:
    # Ticks such as 12.5 are wider than those the first layout sees.
    ax = plots.plot_item_slopes(make_effect(np.linspace(4, 15, 27).tolist()))
    figure = ax.figure
    figure.savefig(io.BytesIO())
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.x1 <= figure.get_figwidth()
    assert box.y0 >= 0


def test_a_drawing_function_keeps_its_name_and_words() -> None:
    assert plots.plot_cost.__name__ == "plot_cost"
    assert "Args:" in (plots.plot_cost.__doc__ or "")
    assert styled(plots.plot_cost).__wrapped__ is plots.plot_cost


def test_numbers_have_a_true_minus() -> None:
    assert number(-0.5) == "−0.5"
    assert number(-1e-6, ".1e") == "−1.0e−06"


def test_the_axis_says_what_a_dose_is() -> None:
    assert "residual norms" in axis_label("dose")
    assert "plan" in axis_label("scale")
