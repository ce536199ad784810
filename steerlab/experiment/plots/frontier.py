"""Cost frontier: what each dose buys, against what it costs."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steerlab.experiment._wording import metric_label, number
from steerlab.experiment.plots._frames import need_columns
from steerlab.experiment.plots._palette import AGAINST, REAL, readable
from steerlab.experiment.plots._ratios import ratio_axis
from steerlab.experiment.plots.style import new_axes, note, styled, zero_line


@styled
def plot_cost_frontier(
    frame: pd.DataFrame,
    ax: Axes | None = None,
    *,
    value: str = "value",
    metric: str = "log_prob_margin",
    bound: float | None = None,
) -> Axes:
    """Change of the metric against the perplexity ratio, a dot per dose, joined in order of dose.

    Args:
        frame: `dose`, `ppl_ratio` and the `value` column, a row per dose; `effect.by_dose()` is one.
        ax: axes to draw on; a new figure by default.
        value: the column with the metric; the change is from its value at dose 0, or as it stands without one.
        metric: the metric's name, for the label.
        bound: perplexity ratio beyond which doses are refused; drawn as a line.

    Raises:
        DataError: if a column is missing.
    """
    need_columns(frame, ["dose", "ppl_ratio", value], "plot_cost_frontier")
    ax = new_axes(ax)
    points = frontier_points(frame, value)
    within = points.ppl_ratio <= (np.inf if bound is None else bound)
    ax.plot(points.ppl_ratio, points.change, color=REAL, linewidth=0.8, alpha=0.6)
    ax.plot(points.ppl_ratio[within], points.change[within], "o", color=REAL)
    ax.plot(points.ppl_ratio[~within], points.change[~within], "o", color=REAL, markerfacecolor="white")
    for dose, ratio, change in points.itertuples(index=False):
        _label(ax, number(dose), ratio, change)
    zero_line(ax)
    if bound is not None and np.isfinite(bound):
        ax.axvline(bound, color=AGAINST, linestyle="--", linewidth=1)
    ratio_axis(ax.xaxis)
    ax.margins(x=0.16, y=0.14)
    if bound is not None and np.isfinite(bound):
        note(ax, f"bound ×{bound:g}", (bound, 0), (-3, 2), ha="right", color=readable(AGAINST))
    ax.set_xlabel("perplexity ratio, neutral text (log scale)")
    ax.set_ylabel(f"change of {metric_label(metric)}".replace(" (nats)", "\n(nats)"))
    ax.set_title("What each dose buys, and costs")
    return ax


def frontier_points(frame: pd.DataFrame, value: str = "value") -> pd.DataFrame:
    """The dots of the frontier.

    Returns:
        In order of dose: `dose`, `ppl_ratio`, `change` (of the metric, from dose 0 if that is there).
    """
    ordered: Any = frame.sort_values("dose", ignore_index=True)
    base = ordered.loc[ordered.dose == 0, value]
    change = ordered[value] - (base.iloc[0] if len(base) else 0.0)
    return pd.DataFrame({"dose": ordered.dose, "ppl_ratio": ordered.ppl_ratio, "change": change})


def describe_cost_frontier(frame: pd.DataFrame, *, value: str = "value", bound: float | None = None) -> str:
    """The largest change within the bound and its price, in a sentence."""
    points: Any = frontier_points(frame, value)
    within = points[points.ppl_ratio <= (np.inf if bound is None else bound)]
    if within.empty:
        return "No dose stays within the cost bound."
    best = within.loc[within.change.abs().idxmax()]
    limit = "" if bound is None else " within the cost bound"
    return (
        f"The largest change{limit} is {number(best.change, '+.2f')}, at dose {number(best.dose)}, where neutral "
        f"text has {best.ppl_ratio:.3g} times the unsteered model's perplexity."
    )


def _label(ax: Axes, text: str, ratio: float, change: float) -> None:
    """A dot's dose, outside the curve: effects grow with their price, so it lies up or down to the left."""
    up = change >= 0
    note(ax, text, (ratio, change), (-4, 3 if up else -3), ha="right", va="bottom" if up else "top")
