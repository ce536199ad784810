"""Plots of an effect. Each takes `ax=` and returns the axes; colours are safe for the colour-blind and for print."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from steerlab.experiment.effect import item_table
from steerlab.measures.intervals import cluster_bootstrap_mean

if TYPE_CHECKING:
    from steerlab.experiment.effect import Effect

MAX_TICKS = 9
REAL, NEGATIVE = "#0072B2", "#D55E00"
FAMILIES = {"random": ("#777777", "random directions"), "shuffled": ("#E69F00", "label flips")}


@contextmanager
def style() -> Iterator[None]:
    """Our matplotlib style, for the body of a `with`."""
    with plt.style.context(str(files("steerlab.experiment") / "steerlab.mplstyle")):
        yield


def new_axes(ax: Axes | None, width: float = 5.2, height: float = 3.5) -> Axes:
    """The axes given, or those of a new figure in our style."""
    if ax is not None:
        return ax
    with style():
        return plt.subplots(figsize=(width, height), layout="constrained")[1]


def axis_label(effect: "Effect") -> str:
    """What the x axis shows."""
    return "dose (median residual norms)" if effect.settings.axis == "dose" else "scale (multiples of the plan)"


def plot_dose_response(effect: "Effect", ax: Axes | None = None) -> Axes:
    """Mean metric over items per dose, with a bootstrap interval, and the range of each null family as a wedge.

    A wedge spans the control slopes from smallest to largest, drawn through the real vector's baseline. Doses that the
    perplexity bound excludes are hollow.
    """
    ax = new_axes(ax)
    doses = np.array(effect.doses)
    table = item_table(effect.rows, "vector", 0, effect.doses)
    groups = effect.item_slopes.group.tolist()
    intervals = [cluster_bootstrap_mean(column, groups, n_resamples=1000) for column in table.T]
    means = table.mean(axis=0)
    for family, (colour, label) in FAMILIES.items():
        _wedge(ax, effect, family, colour, label, doses, means)
    low, high = [i.low for i in intervals], [i.high for i in intervals]
    ax.fill_between(doses, low, high, color=REAL, alpha=0.18, linewidth=0, label="95 % interval")
    ax.plot(doses, means, color=REAL, label="vector")
    fitted = np.isin(doses, effect.fitted_doses)
    ax.plot(doses[fitted], means[fitted], "o", color=REAL)
    ax.plot(doses[~fitted], means[~fitted], "o", color=REAL, markerfacecolor="white")
    if (~fitted).any():
        ax.plot([], [], "o", color=REAL, markerfacecolor="white", label="past the cost bound")
    _dose_axis(ax, effect, doses)
    ax.set_ylabel(_metric_label(effect))
    fitted_slope = f"slope {effect.slope:+.2f} [{effect.ci[0]:+.2f}, {effect.ci[1]:+.2f}]"
    ax.set_title(f"Dose-response: {fitted_slope if np.isfinite(effect.slope) else 'no slope'}")
    ax.legend(loc="best")
    return ax


def _wedge(
    ax: Axes, effect: "Effect", family: str, colour: str, label: str, doses: np.ndarray, means: np.ndarray
) -> None:
    slopes = effect.null_slopes[effect.null_slopes.family == family].slope
    if slopes.empty:
        return
    base = float(np.interp(0.0, doses, means))
    ends = np.array([slopes.min() * doses, slopes.max() * doses])
    ax.fill_between(
        doses,
        base + ends.min(axis=0),
        base + ends.max(axis=0),
        color=colour,
        alpha=0.22,
        linewidth=0,
        label=f"{len(slopes)} {label}",
    )


def plot_item_slopes(effect: "Effect", ax: Axes | None = None) -> Axes:
    """Every item's own slope, sorted; anti-steerable items stand out."""
    ax = new_axes(ax)
    slopes = np.sort(effect.item_slopes.slope.to_numpy())
    if not np.isfinite(slopes).all():
        return _empty(ax, "Per-item slopes")
    colours = [NEGATIVE if slope < 0 else REAL for slope in slopes]
    ax.bar(np.arange(1, len(slopes) + 1), slopes, color=colours, width=0.8)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.axhline(effect.slope, color="black", linewidth=1, linestyle="--", label=f"mean {effect.slope:.2f}")
    ax.set_xlim(0.2, len(slopes) + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("item, by slope")
    ax.set_ylabel(f"slope per unit {effect.settings.axis}")
    ax.set_title(f"Per-item slopes: {effect.anti_steerable:.0%} anti-steerable")
    ax.legend(loc="best")
    return ax


def plot_null_slopes(effect: "Effect", ax: Axes | None = None) -> Axes:
    """Slopes of all control draws beside the real one, over the same two doses."""
    ax = new_axes(ax)
    if not np.isfinite(effect.rank_slope):
        return _empty(ax, "Against the nulls")
    names = {**{f: label for f, (_, label) in FAMILIES.items()}, "wrong_layer": "wrong layer"}
    present = [f for f in names if (effect.null_slopes.family == f).any()]
    for row, family in enumerate(present):
        slopes = effect.null_slopes[effect.null_slopes.family == family].slope.to_numpy()
        spread = np.linspace(-0.18, 0.18, len(slopes)) if len(slopes) > 1 else np.zeros(1)
        colour = FAMILIES.get(family, ("#CC79A7", ""))[0]
        ax.plot(slopes, row + spread, "o", color=colour, alpha=0.8)
    ax.plot([effect.rank_slope], [len(present)], "D", color=REAL)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(present) + 1), [names[f] for f in present] + ["vector"])
    ax.set_ylim(-0.6, len(present) + 0.6)
    ax.set_xlabel(f"slope per unit {effect.settings.axis}, between the outermost fitted doses")
    ax.set_title("Against the nulls")
    return ax


def plot_cost(effect: "Effect", ax: Axes | None = None) -> Axes:
    """Perplexity of neutral text per dose, as a ratio to the unsteered model's, with the bound."""
    ax = new_axes(ax)
    cost, bound = effect.cost.sort_values("dose"), effect.settings.max_ppl_ratio
    ax.plot(cost.dose, cost.ppl_ratio - 1, "o-", color=REAL)
    ax.axhline(bound - 1, color=NEGATIVE, linestyle="--")
    ax.annotate(
        f"bound: {bound - 1:.0%}",
        (0, bound - 1),
        (4, 2),
        ("axes fraction", "data"),
        "offset points",
        va="bottom",
        color=NEGATIVE,
        fontsize="small",
    )
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _dose_axis(ax, effect, cost.dose.to_numpy())
    ax.set_ylabel("perplexity of neutral text,\nincrease over the unsteered model")
    ax.set_title("Cost")
    return ax


def _dose_axis(ax: Axes, effect: "Effect", doses: np.ndarray) -> None:
    """Labels the x axis and puts its ticks at the doses that were run, if they are few."""
    ax.set_xlabel(axis_label(effect))
    if len(doses) <= MAX_TICKS:
        ax.set_xticks(doses, [f"{dose:g}".replace("-", "−") for dose in doses])


def _empty(ax: Axes, title: str) -> Axes:
    """Says that there is nothing to draw."""
    ax.set_title(title)
    ax.set_axis_off()
    ax.text(0.5, 0.5, "No slopes: fewer than two doses stay\nwithin the cost bound.", ha="center", va="center")
    return ax


def _metric_label(effect: "Effect") -> str:
    names = {"log_prob_margin": "log-prob margin (nats)", "choice_prob": "probability of the positive targets"}
    return names.get(effect.settings.metric, effect.settings.metric)
