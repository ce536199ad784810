"""The part of a report on transfer: what a plan does on other items or another model, beside its effect at home."""

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from steerlab.experiment.effect import Effect
from steerlab.experiment.plots.style import metric_label, number
from steerlab.experiment.report.blocks import Block, Paragraph, Section, Subsection
from steerlab.experiment.report.tables import MISSING, cell, table_of
from steerlab.experiment.transfer import Transfer

_LONG_HASH: Final = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")


def transfer_sections(transfers: Sequence[Transfer], effects: Sequence[Effect]) -> list[Section]:
    """One section of all transfers, with a table of them if there are several.

    Args:
        transfers: in the order in which they were measured.
        effects: where the same plans may have been measured at home.
    """
    if not transfers:
        return []
    parts = [transfer_blocks(one, _home(one, effects), f"findings/transfer-{k:03d}") for k, one in enumerate(transfers)]
    if len(parts) == 1:
        return [Section("Transfer", parts[0])]
    caption = "Slopes with intervals over items, and as a share of the slope of the same plan's effect above"
    overview = table_of(transfer_table(transfers, effects), caption)
    each = [Subsection(f"Transfer {k}", part) for k, part in enumerate(parts, start=1)]
    return [Section("Transfer", [overview, *each])]


def transfer_table(transfers: Sequence[Transfer], effects: Sequence[Effect]) -> pd.DataFrame:
    """A row per transfer: where it ran, its slope with interval, and that slope beside the effect's at home."""
    return pd.DataFrame(
        [
            {
                "transfer": k,
                "model": one.model,
                "slope": one.slope,
                "slope_low": one.low,
                "slope_high": one.high,
                "of effect": _percent(_share(one, _home(one, effects))),
                "anti-steerable": _percent(one.anti_steerable),
                "metric": one.metric,
            }
            for k, one in enumerate(transfers, start=1)
        ]
    )


def transfer_blocks(transfer: Transfer, home: Effect | None, place: str) -> list[Block]:
    """What a plan does elsewhere, how that place differs, and the means per dose."""
    means = transfer.rows.groupby("dose", as_index=False).value.mean()
    caption = "Mean over items at each dose"
    where = f"Weights {transfer.weights_hash}, items {transfer.on_hash}, plan {transfer.plan_hash}; all in {place}."
    return [
        Paragraph(_said(transfer, home)),
        *(Paragraph(note) for note in map(shortened, transfer.notes)),
        table_of(means.rename(columns={"value": transfer.metric}), caption, place=f"{place}/rows.parquet"),
        Paragraph(shortened(where), quiet=True),
    ]


def shortened(text: str) -> str:
    """The text with the beginning of each long hash.

    Examples:
        >>> shortened("weights " + "0123456789abcdef" * 4)
        'weights 0123456789ab…'
    """
    return _LONG_HASH.sub(r"\1…", text)


def _said(transfer: Transfer, home: Effect | None) -> str:
    rows: Any = transfer.rows
    items, groups = rows.item.nunique(), rows.group.nunique()
    what, axis = ("The plan", "scale") if home is None else (home.plan_text, home.settings.axis)
    low, high = transfer.low, transfer.high
    interval = "no interval: one group" if math.isnan(low) else f"interval {cell(low)} to {cell(high)}"
    text = (
        f"{what}, run on {transfer.model} with {items} items in {groups} groups: the metric, "
        f"{metric_label(transfer.metric)}, changes by {cell(transfer.slope)} per unit of {axis} ({interval}), and "
        f"{_percent(transfer.anti_steerable)} of the items are anti-steerable."
    )
    share = _share(transfer, home)
    if home is None or math.isnan(share):
        return text
    return f"{text} That is {_percent(share)} of the slope of its effect above, {cell(home.slope)}."


def _home(transfer: Transfer, effects: Sequence[Effect]) -> Effect | None:
    """The effect of the same plan with the same metric; None if there is none."""
    same = (effect for effect in effects if effect.plan_hash == transfer.plan_hash)
    return next((effect for effect in same if _of_one_metric(transfer, effect)), None)


def _of_one_metric(transfer: Transfer, effect: Effect) -> bool:
    """Two functions of one name are two metrics; a run of an earlier version noted the name alone."""
    if transfer.metric_identity is None:
        return effect.settings.metric == transfer.metric
    return effect.settings.metric_identity == transfer.metric_identity


def _share(transfer: Transfer, home: Effect | None) -> float:
    """The slope here as a share of that at home; NaN if there is none to compare with."""
    if home is None or not math.isfinite(home.slope) or home.slope == 0:
        return math.nan
    return transfer.slope / home.slope


def _percent(share: float) -> str:
    return MISSING if math.isnan(share) else f"{number(100 * share, '.0f')}\u00a0%"
