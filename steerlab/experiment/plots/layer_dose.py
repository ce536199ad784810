"""Layer × dose: where, and how strongly, an edit moves the metric."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm

from steerlab.core.errors import DataError
from steerlab.experiment._wording import axis_label, number
from steerlab.experiment.plots._frames import need_columns
from steerlab.experiment.plots._palette import DIVERGING
from steerlab.experiment.plots.style import new_axes, styled

_PRINTED_UP_TO = 60
_TICKS = 12


@styled
def plot_layer_dose(
    frame: pd.DataFrame,
    ax: Axes | None = None,
    *,
    value: str = "value",
    label: str = "change of log-prob margin (nats)",
    axis: str = "dose",
) -> Axes:
    """A cell per layer and dose, coloured around 0; the values are printed if there are at most 60.

    Args:
        frame: `layer`, `dose` and the `value` column, at most one row per layer and dose. A cell without a row, or with
            NaN, stays empty.
        ax: axes to draw on; a new figure by default.
        value: the column to colour by: a change from the unsteered model, or a slope, so that 0 means nothing.
        label: what the column holds, with its unit.
        axis: `dose` or `scale`.

    Raises:
        DataError: if a column is missing, or a cell has several rows.
    """
    need_columns(frame, ["layer", "dose", value], "plot_layer_dose")
    if frame.duplicated(["layer", "dose"]).any():
        raise DataError("plot_layer_dose takes one row per layer and dose; average over items, or choose one vector.")
    table: Any = frame.pivot(index="layer", columns="dose", values=value)
    ax = new_axes(ax, height=float(np.clip(1.1 + 0.17 * len(table), 2.4, 5.0)))
    norm = CenteredNorm(0.0, halfrange=_halfrange(table))
    image = ax.imshow(table.to_numpy(), cmap=DIVERGING, norm=norm, aspect="auto", origin="lower")
    ax.set_facecolor("#dddddd")
    _ticks(ax, table)
    if table.size <= _PRINTED_UP_TO:
        _print_values(ax, table, norm)
    figure: Any = ax.figure
    bar = figure.colorbar(image, ax=ax, label=label, pad=0.02, fraction=0.06)
    bar.outline.set_visible(False)
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlabel(axis_label(axis))
    ax.set_ylabel("layer")
    ax.set_title(_title(table, axis))
    return ax


def describe_layer_dose(frame: pd.DataFrame, *, value: str = "value", axis: str = "dose") -> str:
    """The strongest cell, in a sentence."""
    known: Any = frame.dropna(subset=[value])
    if known.empty:
        return "No cell of layer and dose has a value."
    best = known.loc[known[value].abs().idxmax()]
    return (
        f"Over {known.layer.nunique()} layers and {known.dose.nunique()} doses the largest value in size is "
        f"{number(best[value], '+.2f')}, at layer {best.layer:.0f} and {axis} {number(best.dose)}."
    )


def _halfrange(table: Any) -> float:
    """The largest size in the table; 1 where all is 0 or missing, so that the colours have a range."""
    sizes = np.abs(table.to_numpy(dtype=float))
    return float(np.nanmax(sizes)) or 1.0 if np.isfinite(sizes).any() else 1.0


def _ticks(ax: Axes, table: Any) -> None:
    step = -(-len(table) // _TICKS)
    ax.set_yticks(range(0, len(table), step), [f"{layer:g}" for layer in table.index[::step]])
    step = -(-len(table.columns) // _TICKS)
    ax.set_xticks(range(0, len(table.columns), step), [number(float(d)) for d in table.columns[::step]])
    ax.tick_params(length=0)


def _print_values(ax: Axes, table: Any, norm: CenteredNorm) -> None:
    for (row, column), value in np.ndenumerate(table.to_numpy(dtype=float)):
        if np.isfinite(value):
            dark = abs(value) > 0.6 * norm.halfrange
            ax.text(
                column,
                row,
                _short(value),
                ha="center",
                va="center",
                color="white" if dark else "#222222",
                fontsize=7,
            )


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return number(value, "+.2g" if abs(value) < 1 else "+.1f")


def _title(table: Any, axis: str) -> str:
    values = table.stack().dropna()
    if values.empty:
        return "No values"
    layer, dose = values.abs().idxmax()
    return f"Strongest at layer {layer}, {axis} {number(float(dose))}"
