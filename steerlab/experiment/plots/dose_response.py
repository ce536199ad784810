"""Dose-response: the metric at each dose, with its interval and the band of each null family."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from steerlab.experiment._wording import metric_label, number, with_ends
from steerlab.experiment.plots._dose_figures import DoseFigures
from steerlab.experiment.plots._palette import FAMILIES, REAL
from steerlab.experiment.plots.style import direct_labels, dose_axis, hollow_note, new_axes, styled
from steerlab.measures.intervals import cluster_t_mean

_BANDS = ("random", "shuffled")


@styled
def plot_dose_response(effect: DoseFigures, ax: Axes | None = None) -> Axes:
    """Mean metric over items per dose with an interval over groups, and the range of each null family's means.

    Null bands span the means of all draws at the doses they ran at, and the unsteered mean at 0; between those doses
    they are straight. Doses past the perplexity bound are hollow.

    Args:
        effect: its `rows` need `family`, `draw`, `dose`, `item`, `group`, `value`.
        ax: axes to draw on; a new figure by default.
    """
    ax = new_axes(ax)
    table, groups = _by_item(effect)
    doses, means = table.columns.to_numpy(dtype=float), table.mean(axis=0, skipna=False).to_numpy()
    ends = [_band(ax, null_band(effect, family), family) for family in _BANDS]
    intervals = [cluster_t_mean(table[dose].to_numpy(), groups, level=effect.settings.level) for dose in table.columns]
    low, high = [i.low for i in intervals], [i.high for i in intervals]
    name = "vector" if np.isnan(low).all() else f"vector, with\n{100 * effect.settings.level:.0f} % interval"
    ax.fill_between(doses, low, high, color=REAL, alpha=0.2, linewidth=0, label="interval")
    ax.plot(doses, means, color=REAL, label="vector")
    fitted = np.isin(doses, effect.fitted_doses)
    ax.plot(doses[fitted], means[fitted], "o", color=REAL)
    if not fitted.all():
        refused = ax.plot(doses[~fitted], means[~fitted], "o", color=REAL, markerfacecolor="white")
        refused[0].set_label("past the cost bound")
        hollow_note(ax)
    dose_axis(ax, effect.settings.axis, doses)
    ax.set_ylabel(metric_label(effect.settings.metric))
    ax.set_title(_title(effect))
    direct_labels(ax, [(means[-1], name, REAL), *(end for end in ends if end)])
    return ax


def null_band(effect: DoseFigures, family: str) -> pd.DataFrame:
    """Smallest and largest mean over items, among the draws of a null family.

    Returns:
        A row per dose the family ran at, and one for dose 0 if the vector ran there: `dose`, `low`, `high`, `draws`.
    """
    rows: Any = effect.rows
    part = rows[rows.family == family]
    means = part.groupby(["dose", "draw"]).value.mean()
    band = means.groupby("dose").agg(["min", "max", "size"]).reset_index()
    band.columns = ["dose", "low", "high", "draws"]
    base = rows[(rows.family == "vector") & (rows.dose == 0)].value.mean()
    if band.empty or (band.dose == 0).any() or np.isnan(base):
        return band
    origin = pd.DataFrame({"dose": [0.0], "low": [base], "high": [base], "draws": [band.draws.max()]})
    return pd.concat([band, origin]).sort_values("dose", ignore_index=True)


def describe_dose_response(effect: DoseFigures) -> str:
    """What the dose-response shows, in a sentence."""
    table, _ = _by_item(effect)
    first, last = table.columns.min(), table.columns.max()
    means = table.mean(axis=0, skipna=False)
    moved = (
        f"Mean {metric_label(effect.settings.metric)} over {len(table)} items goes from "
        f"{number(means[first], '.2f')} at {effect.settings.axis} {number(first)} to {number(means[last], '.2f')} at "
        f"{number(last)}"
    )
    if not np.isfinite(effect.slope):
        return f"{moved}; too few doses stay within the cost bound for a slope."
    return f"{moved}; slope {_slope(effect)} per unit of {effect.settings.axis}."


def _by_item(effect: DoseFigures) -> tuple[Any, list[str]]:
    """The vector's metric, a row per item and a column per dose, and the items' groups."""
    real: Any = effect.rows[effect.rows.family == "vector"]
    table = real.groupby(["item", "dose"]).value.mean().unstack("dose")
    groups = real.drop_duplicates("item").set_index("item").group.loc[table.index]
    return table, groups.tolist()


def _band(ax: Axes, band: Any, family: str) -> tuple[float, str, str] | None:
    """Draws a family's range, and gives its label."""
    if band.empty:
        return None
    colour, name = FAMILIES[family]
    last = band.iloc[-1]
    if family == "random":
        ax.fill_between(band.dose, band.low, band.high, color=colour, alpha=0.35, linewidth=0, label=name)
        height = (last.low + last.high) / 2
    else:
        ax.plot(band.dose, band.low, color=colour, linewidth=1, linestyle="--", label=name)
        ax.plot(band.dose, band.high, color=colour, linewidth=1, linestyle="--")
        height = last.low
    return float(height), f"{band.draws.max()} {name}".replace(" directions", "\ndirections"), colour


def _title(effect: DoseFigures) -> str:
    return f"Slope {_slope(effect)}" if np.isfinite(effect.slope) else "No slope: too few doses within the bound"


def _slope(effect: DoseFigures) -> str:
    return with_ends(effect.slope, *effect.ci, places=2).replace("-", "−")
