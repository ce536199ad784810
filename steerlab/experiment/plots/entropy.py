"""Entropy over positions: the same text in both arms, and how far apart the arms are."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from steerlab.experiment._wording import number
from steerlab.experiment.plots._frames import need_columns
from steerlab.experiment.plots._palette import BASE, INK, REAL
from steerlab.experiment.plots.style import direct_labels, new_axes, styled

_UNSMOOTHED_UP_TO = 80
_SHARE = (5, 2)
"""Heights of the entropy's panel and of the one below it."""


@styled
def plot_entropy(
    frame: pd.DataFrame,
    ax: Axes | None = None,
    *,
    base: str = "base",
    steered: str = "steered",
    kl: str = "kl",
) -> Axes:
    """Mean entropy over texts at each position, unsteered and steered, and KL(steered‖base) under it if it is there.

    Beyond 80 positions the thick lines are running means, over the thin ones. The texts that reach a position are fewer
    towards the end; positions with one text only are drawn too.

    Args:
        frame: a row per text and position: `position` and the columns named below, in nats.
        ax: axes to draw on; a new figure by default. The KL panel becomes a child of it.
        base: column of the unsteered entropy.
        steered: column of the steered entropy.
        kl: column of the divergence; without it there is one panel. Infinite values are marked at the top.

    Raises:
        DataError: if a column is missing.
    """
    need_columns(frame, ["position", base, steered], "plot_entropy")
    has_kl = kl in frame.columns
    ax = new_axes(ax, height=3.4 if has_kl else 2.8)
    means: Any = frame.groupby("position")[[base, steered]].mean()
    window = _window(len(means))
    arms = ((base, BASE, "--", "unsteered"), (steered, REAL, "-", "steered"))
    ends = [_line(ax, means[column], window, colour, line, name) for column, colour, line, name in arms]
    ax.set_ylabel("entropy (nats)")
    ax.set_ylim(bottom=0)
    ax.set_title(_title(frame, base, steered))
    lowest = _kl_panel(ax, frame, kl, window) if has_kl else ax
    lowest.set_xlabel("position in the text" + (f" (running mean over {window})" if window > 1 else ""))
    lowest.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    direct_labels(ax, ends)
    return ax


def describe_entropy(frame: pd.DataFrame, *, base: str = "base", steered: str = "steered", kl: str = "kl") -> str:
    """Both means and the divergence, in a sentence."""
    before, after = frame[base].to_numpy(dtype=float).mean(), frame[steered].to_numpy(dtype=float).mean()
    text = (
        f"Over {len(frame)} positions the mean entropy is {before:.3f} nats unsteered and {after:.3f} steered "
        f"({number(after - before, '+.3f')})"
    )
    if kl not in frame.columns:
        return text + "."
    divergence = frame[kl].to_numpy(dtype=float)
    finite, infinite = divergence[np.isfinite(divergence)], int(np.isinf(divergence).sum())
    apart = f"; KL(steered‖base) is {finite.mean():.3f} nats on average" if len(finite) else ""
    return text + apart + (f", and infinite at {infinite} of them." if infinite else ".")


def _window(positions: int) -> int:
    """Positions to average over: one, or about a fortieth of a long text."""
    return 1 if positions <= _UNSMOOTHED_UP_TO else max(5, positions // 40)


def _line(ax: Axes, values: Any, window: int, colour: str, line: str, name: str) -> tuple[float, str, str]:
    """Draws one arm, and gives its label."""
    if window > 1:
        ax.plot(values.index, values, color=colour, linewidth=0.5, alpha=0.45)
    smooth = values.rolling(window, center=True, min_periods=1).mean()
    ax.plot(values.index, smooth, color=colour, linestyle=line, label=name)
    return float(smooth.iloc[-1]), name, colour


def _kl_panel(ax: Axes, frame: Any, kl: str, window: int) -> Axes:
    panel = _panel_below(ax)
    values = frame[["position", kl]]
    finite = values[np.isfinite(values[kl])].groupby("position")[kl].mean()
    infinite = values[np.isinf(values[kl])].position.unique()
    smooth = finite.rolling(window, center=True, min_periods=1).mean()
    panel.fill_between(smooth.index, smooth, color=REAL, alpha=0.25, linewidth=0)
    panel.plot(smooth.index, smooth, color=REAL, linewidth=1)
    if len(infinite):
        panel.plot(
            infinite, np.ones(len(infinite)), "v", color=INK, transform=panel.get_xaxis_transform(), clip_on=False
        )
    panel.set_ylim(bottom=0)
    panel.set_ylabel("KL (nats)")
    ax.tick_params(labelbottom=False)
    return panel


def _panel_below(ax: Axes) -> Axes:
    """Axes that take the lower part of these ones' place: of their grid cell, or of their box if they have none."""
    figure: Any = ax.figure
    cell = ax.get_subplotspec()
    if cell is not None:
        upper, lower = cell.subgridspec(2, 1, height_ratios=_SHARE, hspace=0.08)
        ax.set_subplotspec(upper)
        return figure.add_subplot(lower, sharex=ax)
    box = ax.get_position()
    upper, gap, lower = box.height * np.array([_SHARE[0], 0.3, _SHARE[1]]) / (sum(_SHARE) + 0.3)
    ax.set_position((box.x0, box.y0 + lower + gap, box.width, upper))
    return figure.add_axes((box.x0, box.y0, box.width, lower), sharex=ax)


def _title(frame: Any, base: str, steered: str) -> str:
    change = frame[steered].mean() - frame[base].mean()
    return f"Entropy changes by {number(change, '+.3f')} nats per token"
