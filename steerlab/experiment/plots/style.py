"""Our look, applied inside our own functions only, and the words that axes share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.resources import files
from typing import Final, ParamSpec

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from steerlab.experiment.wording import axis_label, number

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
                # The layout makes room for the labels of the ticks it finds, and changes them by making room.
                ax.figure.draw_without_rendering()  # pyright: ignore[reportAttributeAccessIssue]  no sub-figure here
        return ax

    return drawn


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


def legend_below(ax: Axes, *, columns: int = 2, gap: float = 0.24) -> None:
    """The legend under the x label, where it covers no data."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -gap), ncols=columns, borderaxespad=0.0)


def nothing_to_draw(ax: Axes, title: str, reason: str) -> Axes:
    """Says why there is nothing to draw."""
    ax.set_title(title)
    ax.set_axis_off()
    ax.text(0.5, 0.5, reason, ha="center", va="center", transform=ax.transAxes, wrap=True)
    return ax
