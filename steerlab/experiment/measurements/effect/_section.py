"""The part of a report on one effect: verdict first, then figures, plots, tables and receipts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from steerlab.experiment._blocks import (
    Block,
    Folded,
    KeyFigures,
    Paragraph,
    Plot,
    Plots,
    Section,
    Subsection,
    Table,
    Verdict,
)
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import MISSING, count, table_of
from steerlab.experiment._wording import CONTROL_NAMES, metric_label, number
from steerlab.experiment.measurements._interval_rule import rule_of
from steerlab.experiment.measurements.effect._settings import ADJUSTMENTS
from steerlab.experiment.measurements.effect.result import Effect

_TONES = {
    "effect": "good",
    "no effect": "neutral",
    "inconclusive": "neutral",
    "not tested": "neutral",
    "collapsed": "bad",
}
_ARMS = {"vector": "the vector"} | CONTROL_NAMES


def effect_sections(m: Material) -> list[Section]:
    effects = m.of("effects")
    if len(effects) == 1:
        return [_section(effects[0], "Effect", "effects/000", m.prompts)]
    return [_section(effect, f"Effect {k + 1}", f"effects/{k:03d}", m.prompts) for k, effect in enumerate(effects)]


def verdict_sentence(effect: Effect) -> str:
    """The verdict with the figures that it rests on, in one sentence."""
    word = effect.verdict[:1].upper() + effect.verdict[1:]
    if not np.isfinite(effect.slope):
        return f"{word}: fewer than two doses stay within the cost bound."
    ends = " to ".join(number(end, "+.2f") for end in effect.ci)
    level = f"{100 * effect.settings.level:.0f}\u00a0%"
    interval = "no interval: one group" if np.isnan(effect.ci[0]) else f"{level} interval {ends}"
    rank = f", and its worst rank among control arms is {effect.null_rank:.3f}" if np.isfinite(effect.null_rank) else ""
    size = "" if np.isnan(effect.margin) else f"; what counts as small is ±{number(effect.margin, '.2f')}"
    return (
        f"{word}: the {metric_label(effect.settings.metric)} changes by {number(effect.slope, '+.2f')} per unit of "
        f"{effect.settings.axis} ({interval}){rank}{size}."
    )


def _section(effect: Effect, title: str, place: str, prompts: Mapping[str, Sequence[str]]) -> Section:
    """All of one effect.

    Args:
        effect: the effect.
        title: heading.
        place: its folder in the run directory.
        prompts: texts of the items by the hash of their targets.
    """
    texts = prompts.get(str(effect.provenance.get("targets_hash")), ())
    blocks: list[Block] = [
        Verdict(f"Verdict: {effect.verdict}", _TONES[effect.verdict], effect.reasons),
        Paragraph(what_was_done(effect)),
        KeyFigures(_key_figures(effect)),
        Plots(_plots(effect)),
        Subsection("Per dose", [_dose_table(effect)]),
        Subsection("Against control arms", [_null_table(effect)]),
        Folded("Items, from the most anti-steerable on", [_item_table(effect, place, texts)]),
        Folded("Receipts: tokens edited per target", [_receipt_table(effect, place)]),
        Folded("Result rows", [_row_table(effect, place)]),
    ]
    return Section(title, blocks)


def what_was_done(effect: Effect) -> str:
    """The procedure in three sentences."""
    rows: Any = effect.rows
    items = effect.item_slopes
    doses = ", ".join(number(dose) for dose in effect.doses)
    first = (
        f"{effect.plan_text} was run at {effect.settings.axis} {doses} on {len(items)} items in "
        f"{items.group.nunique()} groups; the metric is the {metric_label(effect.settings.metric)}."
    )
    controls = rows[rows.family != "vector"].groupby("family", sort=False).draw.nunique()
    if controls.empty:
        return f"{first} No control arm was run."
    arms = ", ".join(f"{draws} × {_ARMS.get(str(family), family)}" for family, draws in controls.items())
    return (
        f"{first} Control arms ({arms}) ran at the outermost doses within the cost bound, and ranks compare slopes "
        "between those two. Slopes are least-squares fits per item over the doses within the bound; the interval "
        f"{_interval_words(effect)}."
    )


def _interval_words(effect: Effect) -> str:
    return "resamples items by group" if effect.settings.rule == 1 else "is Student's t over the groups of items"


def _key_figures(effect: Effect) -> list[tuple[str, str]]:
    unit = f"per unit of {effect.settings.axis}"
    low, high = (_figure(end, "+.2f") for end in effect.ci)
    inner_low, inner_high = (_figure(end, "+.2f") for end in effect.equivalence_ci)
    figures = [
        (_figure(effect.slope, "+.2f"), f"slope {unit}"),
        (f"{low} … {high}", f"{100 * effect.settings.level:.0f} % interval of the slope"),
        (f"{inner_low} … {inner_high}", f"{100 * (2 * effect.settings.level - 1):.0f} % interval, for being small"),
        (f"±{_figure(effect.margin, '.2f')}" if np.isfinite(effect.margin) else MISSING, f"margin: {_margin(effect)}"),
        (_figure(effect.detectable, ".2f"), "slope found in 80 % of such runs"),
        (_figure(effect.size_over_items, "+.2f"), "slope over the spread of items"),
        (_figure(effect.size_over_nulls, ".1f"), "size over the median null slope"),
        (_figure(100 * effect.anti_steerable, ".0f", " %"), "of items are anti-steerable"),
        (_figure(effect.null_rank, ".3f"), "worst null rank"),
        (_figure(effect.curvature, "+.2f"), "curvature per squared unit"),
        (_figure(effect.collapse_dose, "g"), f"{effect.settings.axis} where the cost passes the bound"),
    ]
    if effect.comparisons is not None:
        tested, name = effect.comparisons.n_tested, ADJUSTMENTS[effect.comparisons.adjustment]
        figures.append((_figure(effect.adjusted_rank, ".3f"), f"rank after {name} for {tested} plans"))
    if effect.settings.smallest is not None:
        figures.append((_figure(effect.needed_groups, ".0f"), "groups that would find the smallest slope that matters"))
    return figures


def _margin(effect: Effect) -> str:
    return "the smallest that matters" if effect.settings.smallest is not None else "95 % of random directions"


def _figure(value: float, pattern: str, unit: str = "") -> str:
    return number(value, pattern) + unit if np.isfinite(value) else MISSING


def _plots(effect: Effect) -> list[Plot]:
    from steerlab.experiment import plots
    from steerlab.experiment._blocks.pictures import picture

    bound, by_dose = effect.settings.max_ppl_ratio, effect.by_dose()
    pictures = [
        (
            "dose-response",
            partial(plots.plot_dose_response, effect),
            plots.describe_dose_response(effect),
            "Mean over items at each dose with its interval, beside the range of the control arms' means. Hollow dots "
            "lie past the cost bound.",
        ),
        (
            "null-slopes",
            partial(plots.plot_null_slopes, effect),
            plots.describe_null_slopes(effect),
            "Each dot is one control draw. A draw counts against the vector where it lies beyond either dashed line. "
            "The bar is the interval that must lie inside the shaded margin for the slope to be shown to be small.",
        ),
        (
            "item-slopes",
            partial(plots.plot_item_slopes, effect),
            plots.describe_item_slopes(effect),
            "Each dot is one item. The band is the interval of the mean, the dotted lines the margin; items below 0 "
            "are moved the wrong way.",
        ),
        (
            "cost",
            partial(plots.plot_cost, effect),
            plots.describe_cost(effect),
            "Perplexity of neutral text as a multiple of the unsteered model's; bars are intervals over texts, by "
            f"{rule_of(effect.cost)}.",
        ),
        (
            "cost-frontier",
            partial(plots.plot_cost_frontier, by_dose, metric=effect.settings.metric, bound=bound),
            plots.describe_cost_frontier(by_dose, bound=bound),
            "What each dose changes against what it costs; labels are doses. Farther up or down for the same cost is "
            "better.",
        ),
    ]
    return [picture(name, draw, alt, caption) for name, draw, alt, caption in pictures]


def _dose_table(effect: Effect) -> Table:
    table: Any = effect.by_dose().rename(columns={"value": effect.settings.metric})
    known = [column for column in ("ppl_ratio_low", "ppl_ratio_high") if column not in table.columns]
    table = table.merge(effect.cost[["dose", *(column for column in known if column in effect.cost)]], on="dose")
    return table_of(table, "The vector at each dose; doses past the cost bound are not fitted")


def _null_table(effect: Effect) -> Table:
    table = effect.nulls()
    table["family"] = [_ARMS.get(family, family) for family in table.family]
    return table_of(
        table.rename(columns={"family": "arm"}),
        f"Slopes per unit of {effect.settings.axis}, between the same two doses",
    )


def _item_table(effect: Effect, place: str, texts: Sequence[str]) -> Table:
    table: Any = effect.item_slopes.sort_values("slope")
    if texts:
        table = table.assign(item=[texts[item] for item in table["item"]])
    return table_of(table, "Slope of each item", place=f"{place}/rows.parquet (as the rows they are fitted to)")


def _receipt_table(effect: Effect, place: str) -> Table:
    grouped = effect.rows.groupby(["family", "dose"], sort=False)
    table = grouped.agg(
        draws=("draw", "nunique"),
        items=("item", "nunique"),
        edited_tokens_mean=("edited_tokens", "mean"),
        edited_tokens_least=("edited_tokens", "min"),
        edited_tokens_most=("edited_tokens", "max"),
    ).reset_index()
    table["family"] = [_ARMS.get(family, family) for family in table.family]
    caption = "Tokens that the operators counted as edited, per target; at 0 there is nothing to edit"
    return table_of(table.rename(columns={"family": "arm"}), caption, place=place)


def _row_table(effect: Effect, place: str) -> Table:
    rows: Any = effect.rows
    shown = ["family", "draw", "dose", "item", "group", "value", "positive_log_prob", "negative_log_prob"]
    columns: Sequence[str] = [column for column in shown if column in rows.columns]
    caption = f"The first of {count(len(rows))} rows, one per arm, dose and item"
    return table_of(rows[columns], caption, place=f"{place}/rows.parquet", max_rows=20)
