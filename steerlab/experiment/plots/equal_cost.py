"""Arms against their cost: what a vector and other interventions change, by what they do to ordinary text."""

from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes

from steerlab.experiment._wording import metric_label, number
from steerlab.experiment.plots._frames import need_columns
from steerlab.experiment.plots._palette import ELSEWHERE, FLIPS, RANDOM, REAL
from steerlab.experiment.plots._ratios import ratio_axis
from steerlab.experiment.plots.style import direct_labels, new_axes, styled, zero_line

_COLOURS: Final = (REAL, FLIPS, ELSEWHERE, RANDOM)
_MARKS: Final = ("o", "s", "^", "D")


@styled
def plot_equal_cost(points: pd.DataFrame, ax: Axes | None = None, *, metric: str = "log_prob_margin") -> Axes:
    """Change of the metric against the perplexity ratio, a line per arm from the plain prompt on.

    Args:
        points: a row per arm and strength: `arm`, `strength`, `ppl_ratio`, `change`; `change_low` and `change_high` are
            drawn if they are there. The `points` of `Experiment.baselines` are such a frame.
        ax: axes to draw on; a new figure by default.
        metric: the metric's name, for the label.

    Raises:
        DataError: if a column is missing.
    """
    need_columns(points, ["arm", "strength", "ppl_ratio", "change"], "plot_equal_cost")
    ax = new_axes(ax, height=3.0)
    ends = []
    for place, (arm, part) in enumerate(_paths(points)):
        colour, mark = _COLOURS[place % len(_COLOURS)], _MARKS[place % len(_MARKS)]
        ax.plot(part.ppl_ratio, part.change, color=colour, marker=mark, markersize=4)
        if {"change_low", "change_high"} <= set(part.columns):
            ax.vlines(part.ppl_ratio, part.change_low, part.change_high, color=colour, linewidth=0.8, alpha=0.7)
        ends.append((float(part.change.iloc[-1]), arm, colour))
    zero_line(ax)
    ratio_axis(ax.xaxis)
    ax.margins(x=0.08, y=0.12)
    ax.set_xlabel("perplexity ratio, neutral text (log scale)")
    ax.set_ylabel(f"change of {metric_label(metric)}".replace(" (nats)", "\n(nats)"))
    ax.set_title("Change against cost")
    direct_labels(ax, ends)
    return ax


def describe_equal_cost(points: pd.DataFrame) -> str:
    """Each arm's largest change and its price, in a sentence."""
    parts = []
    for arm, part in _paths(points):
        best = part.loc[part.change.abs().idxmax()]
        parts.append(
            f"{arm} changes it by up to {number(best.change, '+.2f')} at {best.ppl_ratio:.3g} times the perplexity"
        )
    return f"{'; '.join(parts)}."


def _paths(points: Any) -> list[tuple[str, Any]]:
    """Per arm its points in order of strength, from 0 on."""
    found = []
    for arm in points.arm.drop_duplicates():
        part = points[points.arm == arm]
        found.append((str(arm), part.loc[part.strength.abs().sort_values().index]))
    return found
