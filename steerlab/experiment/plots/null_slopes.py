"""Null slopes: the vector among directions that should do nothing."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from steerlab.experiment._wording import number, slope_label
from steerlab.experiment.plots._dose_figures import DoseFigures
from steerlab.experiment.plots._palette import FAMILIES, INK, REAL
from steerlab.experiment.plots.style import new_axes, nothing_to_draw, styled, zero_line


@styled
def plot_null_slopes(effect: DoseFigures, ax: Axes | None = None) -> Axes:
    """The slope of every control draw, a row per family, beside the real one, all over the same two doses.

    Ranks count draws on both sides, beyond either dashed line. A row's label says how many draws, and their rank. The
    margin below which a slope counts as small is shaded; the vector's bar is the interval that must lie inside it.

    Args:
        effect: its `null_slopes` need `family`, `draw`, `slope`; also `rank_slope`, `null_ranks`, `margin`,
            `equivalence_ci`.
        ax: axes to draw on; a new figure by default.
    """
    ax = new_axes(ax, height=2.4)
    nulls: Any = effect.null_slopes
    present = [family for family in FAMILIES if (nulls.family == family).any()]
    if not np.isfinite(effect.rank_slope):
        return nothing_to_draw(ax, "Against the nulls", "No slopes: fewer than two doses stay\nwithin the cost bound.")
    if not present:
        return nothing_to_draw(ax, "Against the nulls", "No control arm was run.")
    if np.isfinite(effect.margin):
        ax.axvspan(-effect.margin, effect.margin, color=FAMILIES["random"][0], alpha=0.15, linewidth=0, label="margin")
    zero_line(ax, vertical=True)
    for side in (1, -1):
        ax.axvline(side * abs(effect.rank_slope), color=REAL, linewidth=1, linestyle="--", zorder=1)
    for row, family in enumerate(present):
        slopes = nulls[nulls.family == family].slope.to_numpy()
        ax.plot(slopes, row + _spread(len(slopes)), "o", color=FAMILIES[family][0], alpha=0.75, markeredgewidth=0)
    ax.plot(effect.equivalence_ci, [len(present)] * 2, color=REAL, linewidth=2)
    ax.plot([effect.rank_slope], [len(present)], "D", color=REAL, markersize=6)
    labels = [_row_label(effect, family) for family in present]
    ax.set_yticks(range(len(present) + 1), [*labels, f"vector\n{number(effect.rank_slope, '+.2f')}"])
    ax.set_ylim(-0.6, len(present) + 0.6)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(slope_label(effect.settings.axis))
    ax.set_title(_title(effect))
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    return ax


def describe_null_slopes(effect: DoseFigures) -> str:
    """How the vector stands among its nulls, in a sentence per family."""
    if not np.isfinite(effect.rank_slope):
        return "Nothing is ranked: fewer than two doses stay within the cost bound."
    nulls: Any = effect.null_slopes
    parts = []
    for family, (_, name) in FAMILIES.items():
        slopes = nulls[nulls.family == family].slope
        if len(slopes):
            ranked = effect.null_ranks.get(family, np.nan)
            rank = f", rank {ranked:.3f}" if np.isfinite(ranked) else ", shown but not ranked"
            draws = f"{len(slopes)} draws" if len(slopes) > 1 else "1 draw"
            parts.append(f"{name}, {draws}, at most {number(slopes.abs().max(), '.2f')}{rank}")
    found = "; ".join(parts) or "no control arm was run"
    return (
        f"The vector's slope is {number(effect.rank_slope, '+.2f')}{_size(effect)}. Of the controls, in size: {found}."
    )


def _size(effect: DoseFigures) -> str:
    if not np.isfinite([effect.margin, *effect.equivalence_ci]).all():
        return ""
    low, high = (number(end, "+.2f") for end in effect.equivalence_ci)
    return f" [{low}, {high}], beside a margin of ±{number(effect.margin, '.2f')}"


def _row_label(effect: DoseFigures, family: str) -> str:
    count = int((effect.null_slopes.family == family).sum())
    name = FAMILIES[family][1]
    rank = effect.null_ranks.get(family, np.nan)
    return f"{count} {name}\nrank {rank:.3f}" if np.isfinite(rank) else f"{name}\nnot ranked"


def _title(effect: DoseFigures) -> str:
    worst = effect.null_rank
    return f"Worst null rank {worst:.3f}" if np.isfinite(worst) else "Against the nulls: none is ranked"


def _spread(count: int) -> np.ndarray:
    """Heights that keep neighbours apart, the same at every call."""
    return np.linspace(-0.22, 0.22, count)[np.random.default_rng(0).permutation(count)] if count > 1 else np.zeros(1)
