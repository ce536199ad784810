"""Our look, applied inside our own functions only, and the words that axes share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.resources import files
from typing import Any, Final, ParamSpec

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from steerlab.experiment._wording import axis_label, number
from steerlab.experiment.plots._palette import INK, NOTES, readable

Options = ParamSpec("Options")

COLUMN: Final = 3.5
"""Width of one column of a paper, in inches; the width of every figure made here."""

MAX_TICKS: Final = 9


@contextmanager
def style() -> Iterator[None]:
    """Our matplotlib style, for the body of a `with`; what was set before is back afterwards."""
    matplotlib.get_backend()  # chosen inside, its own settings (such as showing figures at once) would be undone too
    with plt.style.context(str(files("steerlab.experiment.plots") / "steerlab.mplstyle")):
        yield


def styled(draw: Callable[Options, Axes]) -> Callable[Options, Axes]:
    """A function that draws in our style, whatever the caller has set; `ax` is its second argument."""

    @wraps(draw)
    def drawn(*args: Options.args, **options: Options.kwargs) -> Axes:
        given = options.get("ax", args[1] if len(args) > 1 else None)
        with style():
            ax = draw(*args, **options)
            if given is None:
                # The layout makes room for the labels of the ticks it finds, and changes them by making room: it is
                # made a second time when the figure is drawn.
                lay_out(ax.figure)
        return ax

    return drawn


def lay_out(figure: Any) -> None:
    """Makes room for labels and titles, as drawing does first."""
    figure.get_layout_engine().execute(figure)


def new_axes(ax: Axes | None, width: float = COLUMN, height: float = 2.7) -> Axes:
    """The axes given, or those of a new figure in our style; width and height are in inches."""
    if ax is not None:
        return ax
    with style():
        return plt.subplots(figsize=(width, height))[1]


def dose_axis(ax: Axes, axis: str, doses: np.ndarray) -> None:
    """Labels the x axis and puts its ticks at the doses that were run, if they are few."""
    ax.set_xlabel(axis_label(axis))
    if len(doses) <= MAX_TICKS:
        ax.set_xticks(doses, [number(float(dose)) for dose in doses])


def zero_line(ax: Axes, *, vertical: bool = False) -> None:
    """A thin line at 0."""
    (ax.axvline if vertical else ax.axhline)(0, color="#222222", linewidth=0.8, zorder=1)


def direct_labels(ax: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Names of lines to the right of the axes, each at its line's end; moved apart where they would overlap.

    Args:
        ax: axes whose limits are set.
        labels: height of the line's end, in data; name; the line's colour.
    """
    line = 1.25 * NOTES / (ax.get_window_extent().height * 72 / ax.figure.dpi)
    to_axes = ax.transData + ax.transAxes.inverted()
    wanted = sorted((float(to_axes.transform((0, height))[1]), name, colour) for height, name, colour in labels)
    sizes = [line * (1 + name.count("\n")) for _, name, _ in wanted]
    for place, (_, name, colour) in zip(_apart([place for place, _, _ in wanted], sizes), wanted, strict=True):
        ax.annotate(
            name,
            (1, place),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=readable(colour),
            fontsize=NOTES,
        )


def note(ax: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **options: Any) -> None:
    """Words inside a plot, with a white rim so that they can be read over lines; `place` is in data by default."""
    options = {"xycoords": "data", "color": INK, "fontsize": NOTES} | options
    rim = [withStroke(linewidth=2, foreground="white")]
    ax.annotate(text, place, offset, textcoords="offset points", path_effects=rim, **options)


def hollow_note(ax: Axes) -> None:
    """Says what hollow dots are."""
    note(ax, "hollow: past the cost bound", (1, 0), (-3, 3), xycoords="axes fraction", ha="right", va="bottom")


def nothing_to_draw(ax: Axes, title: str, reason: str) -> Axes:
    """Says why there is nothing to draw."""
    ax.set_title(title)
    ax.set_axis_off()
    ax.text(0.5, 0.5, reason, ha="center", va="center", transform=ax.transAxes, wrap=True)
    return ax


def _apart(places: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Middles of boxes as near to the places as they can be without overlap, in the same order, up to 1 at the top.

    Examples:
        >>> _apart([0.5, 0.5], [0.2, 0.2])
        [0.4, 0.6]
    """
    found: list[float] = []
    for place, size in zip(places, sizes, strict=True):
        lowest = found[-1] + (sizes[len(found) - 1] + size) / 2 if found else place
        found.append(max(place, lowest))
    shift = sum(place - new for place, new in zip(places, found, strict=True)) / max(len(found), 1)
    shift = min(shift, 1.0 - found[-1]) if found else 0.0
    return [round(place + shift, 6) for place in found]
