"""Cost: what steering does to the perplexity of ordinary text."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from steerlab.experiment._wording import number
from steerlab.experiment.plots._dose_figures import DoseFigures
from steerlab.experiment.plots._frames import need_columns
from steerlab.experiment.plots._palette import AGAINST, REAL, readable
from steerlab.experiment.plots._ratios import ratio_axis
from steerlab.experiment.plots.style import dose_axis, new_axes, note, styled

_INTERVAL = ("ppl_ratio_low", "ppl_ratio_high")


@styled
def plot_cost(effect: DoseFigures, ax: Axes | None = None) -> Axes:
    """Perplexity of neutral text per dose, as a multiple of the unsteered model's, with the bound of the fit.

    Args:
        effect: its `cost` needs `dose`, `ppl_ratio`; `ppl_ratio_low` and `ppl_ratio_high` are drawn if they are there.
        ax: axes to draw on; a new figure by default.
    """
    need_columns(effect.cost, ["dose", "ppl_ratio"], "plot_cost")
    ax = new_axes(ax)
    cost: Any = effect.cost.sort_values("dose")
    bound = effect.settings.max_ppl_ratio
    ax.plot(cost.dose, cost.ppl_ratio, color=REAL)
    within = cost.ppl_ratio <= bound
    ax.plot(cost.dose[within], cost.ppl_ratio[within], "o", color=REAL)
    ax.plot(cost.dose[~within], cost.ppl_ratio[~within], "o", color=REAL, markerfacecolor="white")
    _draw_intervals(ax, cost)
    if np.isfinite(bound):
        _draw_bound(ax, bound)
    ratio_axis(ax.yaxis)
    dose_axis(ax, effect.settings.axis, cost.dose.to_numpy())
    ax.set_ylabel("perplexity ratio (log scale)")
    ax.set_title(f"Perplexity of neutral text: up to ×{cost.ppl_ratio.max():.3g}")
    return ax


def describe_cost(effect: DoseFigures) -> str:
    """What the doses cost, in a sentence."""
    cost: Any = effect.cost
    bound, worst = effect.settings.max_ppl_ratio, cost.loc[cost.ppl_ratio.idxmax()]
    text = (
        f"Perplexity of neutral text is at most {worst.ppl_ratio:.3g} times the unsteered model's, at "
        f"{effect.settings.axis} {number(worst.dose)}"
    )
    if not np.isfinite(bound):
        return f"{text}; no bound was set."
    return f"{text}; {int((cost.ppl_ratio <= bound).sum())} of {len(cost)} doses stay within the bound of {bound:g}."


def _draw_bound(ax: Axes, bound: float) -> None:
    ax.axhline(bound, color=AGAINST, linestyle="--", linewidth=1)
    colour = readable(AGAINST)
    note(ax, f"bound ×{bound:g}", (0.5, bound), (0, 2), xycoords=ax.get_yaxis_transform(), ha="center", color=colour)


def _draw_intervals(ax: Axes, cost: Any) -> None:
    if all(column in cost.columns for column in _INTERVAL):
        ax.vlines(cost.dose, cost.ppl_ratio_low, cost.ppl_ratio_high, color=REAL, linewidth=1)
