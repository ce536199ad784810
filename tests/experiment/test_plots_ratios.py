"""Axes of perplexity ratios: few round ticks, whose labels never touch."""

import itertools
from collections.abc import Iterator

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.axes import Axes

from steerlab.experiment import plots
from steerlab.experiment.plots._ratios import RatioLocator, ratio_axis

SPANS = [[1.0, 1.02], [1.0, 1.22], [1.0, 1.45], [0.8, 1.9], [1.0, 2.9], [1.0, 42.0], [1.0, 4200.0], [0.97, 3e6]]


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


def labels(ax: Axes, axis: str = "x") -> list[str]:
    ax.figure.canvas.draw()
    (low, high), ticks = sorted(getattr(ax, f"get_{axis}lim")()), getattr(ax, f"get_{axis}ticks")()
    texts = getattr(ax, f"get_{axis}ticklabels")()
    return [text.get_text() for text, tick in zip(texts, ticks, strict=True) if low <= tick <= high]


@pytest.mark.parametrize("bound", [None, 1.5])
@pytest.mark.parametrize("width", [1.6, 2.2, 3.5, 7.0])
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_labels_of_the_frontier_never_touch(span: list[float], width: float, bound: float | None) -> None:
    with plots.style():
        figure, ax = plt.subplots(figsize=(width, 2.7))
    frame = pd.DataFrame({"dose": [0.0, 0.1, 0.2], "ppl_ratio": [1.0, *span], "value": [0.0, 1.0, 2.0]})
    plots.plot_cost_frontier(frame, ax, bound=bound)
    shown = labels(ax)
    renderer = figure.canvas.get_renderer()  # pyright: ignore[reportAttributeAccessIssue]  Agg has one
    boxes = [text.get_window_extent(renderer) for text in ax.get_xticklabels() if text.get_text() in shown]
    gaps = [right.x0 - left.x1 for left, right in itertools.pairwise(boxes)]
    assert all(gap > 0.02 * figure.dpi for gap in gaps), (shown, gaps)
    assert "×1" in shown, "the unsteered model is always named"
    assert len(shown) <= 6


@pytest.mark.parametrize(
    ("span", "wanted"),
    [
        ([1.0, 1.02], ["×1", "×1.01", "×1.02"]),
        ([1.0, 1.22], ["×1", "×1.05", "×1.1", "×1.2"]),
        ([1.0, 2.9], ["×1", "×1.5", "×2", "×3"]),
        ([1.0, 4200.0], ["×1", "×10", "×100", "×1000", "×10000"]),
    ],
    ids=str,
)
def test_ticks_are_few_and_round(span: list[float], wanted: list[str]) -> None:
    frame = pd.DataFrame({"dose": [0.0, 0.2], "ppl_ratio": span, "value": [0.0, 1.0]})
    ax = plots.plot_cost_frontier(frame)
    assert labels(ax) == wanted
    assert ax.get_xscale() == "log"


def test_a_wider_figure_has_more_of_them() -> None:
    frame = pd.DataFrame({"dose": [0.0, 0.2], "ppl_ratio": [1.0, 1.45], "value": [0.0, 1.0]})
    with plots.style():
        figure, ax = plt.subplots(figsize=(2.0, 2.7))
    plots.plot_cost_frontier(frame, ax)
    before = len(labels(ax))
    figure.set_size_inches(9.0, 2.7)
    assert len(labels(ax)) > before


def test_an_upright_axis_has_room_for_more() -> None:
    with plots.style():
        ax = plt.subplots(figsize=(2.7, 2.7))[1]
    ax.plot([0, 1], [1.0, 1.25])
    ratio_axis(ax.yaxis)
    assert {"×1", "×1.1", "×1.2"} <= set(labels(ax, "y"))


def test_an_axis_without_extent_has_no_ticks() -> None:
    assert list(RatioLocator().tick_values(1.0, 1.0)) == []
    assert list(RatioLocator().tick_values(-1.0, 2.0)) == []
