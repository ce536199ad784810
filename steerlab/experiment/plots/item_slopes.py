"""Per-item slopes: items that move as intended, and items that move the other way."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from steerlab.experiment._wording import number, slope_label
from steerlab.experiment.plots._dose_figures import DoseFigures
from steerlab.experiment.plots._palette import AGAINST, FAMILIES, REAL, readable
from steerlab.experiment.plots.style import direct_labels, new_axes, note, nothing_to_draw, styled, zero_line

_VECTOR_DOTS = 500
_NO_SLOPES = "No slopes: fewer than two doses stay\nwithin the cost bound."


@styled
def plot_item_slopes(effect: DoseFigures, ax: Axes | None = None) -> Axes:
    """Every item's own slope, sorted, with the mean and its interval; anti-steerable items are hollow.

    Dotted lines are the margin, ±: a mean is shown to be small where its interval lies between them.

    Args:
        effect: its `item_slopes` need `slope`.
        ax: axes to draw on; a new figure by default.
    """
    ax = new_axes(ax)
    slopes = np.sort(effect.item_slopes.slope.to_numpy())
    if not np.isfinite(slopes).all():
        return nothing_to_draw(ax, "Per-item slopes", _NO_SLOPES)
    place, against = np.arange(1, len(slopes) + 1), slopes < 0
    size = float(np.clip(120 / len(slopes), 1.2, 4.5))
    dots = {"markersize": size, "rasterized": len(slopes) > _VECTOR_DOTS}
    ax.axhspan(*effect.ci, color=REAL, alpha=0.15, linewidth=0)
    if np.isfinite(effect.margin):
        for side in (-1, 1):
            ax.axhline(side * effect.margin, color=FAMILIES["random"][0], linewidth=1, linestyle=":")
    ax.axhline(effect.slope, color=REAL, linewidth=1, linestyle="--", label="mean")
    zero_line(ax)
    ax.plot(place[~against], slopes[~against], "o", color=REAL, label="steered", **dots)
    if against.any():
        last, colour = int(against.sum()), readable(AGAINST)
        ax.plot(
            place[:last], slopes[:last], "o", color=AGAINST, markerfacecolor="white", label="anti-steerable", **dots
        )
        note(ax, f"{last} anti-steerable", (last, slopes[last - 1]), (6, -1), va="top", color=colour)
    ax.set_xlim(0.2, len(slopes) + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    ax.set_xlabel("item, in order of slope")
    ax.set_ylabel(slope_label(effect.settings.axis))
    ax.set_title(f"{_share(effect)} of {len(slopes)} items are anti-steerable")
    direct_labels(ax, [(effect.slope, f"mean\n{number(effect.slope, '+.2f')}", REAL)])
    return ax


def describe_item_slopes(effect: DoseFigures) -> str:
    """What the items' slopes show, in a sentence."""
    slopes = effect.item_slopes.slope
    if not np.isfinite(slopes).all():
        return "No item has a slope: fewer than two doses stay within the cost bound."
    return (
        f"Slopes of {len(slopes)} items run from {number(slopes.min(), '+.2f')} to {number(slopes.max(), '+.2f')} per "
        f"unit of {effect.settings.axis}; {_share(effect)} are below 0 (anti-steerable)."
    )


def _share(effect: DoseFigures) -> str:
    return f"{effect.anti_steerable * 100:.0f} %"
