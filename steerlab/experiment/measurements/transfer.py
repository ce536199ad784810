"""Transfer: the same plan on other data, or on another model of the same width."""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from steerlab.core._numbers import shown
from steerlab.core._warning import warn
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.targets import Targets
from steerlab.display import Facts, Piece, Remarks, Shown
from steerlab.experiment._blocks import Block, Paragraph, Section, Subsection
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import MISSING, cell, table_of
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.fingerprint import Fingerprint
from steerlab.experiment._store.plans import check_plan
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._wording import metric_label, number, with_ends
from steerlab.experiment.measurements._checks import check_doses, check_targets
from steerlab.experiment.measurements._item_values import item_values
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.measures.intervals import cluster_t_mean, least_squares_slopes
from steerlab.steering.plan import Plan

_LONG_HASH: Final = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")


@dataclass(frozen=True, repr=False)
class Transfer(Shown):
    """What a plan does on one model and one set of items.

    Attributes:
        rows: a row per dose and item: `dose`, `item`, `group`, `value`.
        slope: mean least-squares slope of the metric per item.
        low: lower end of its interval, Student's t over groups; NaN for one group.
        high: upper end.
        anti_steerable: share of items whose slope is below 0.
        metric: name of the metric.
        model: name of the model it ran on.
        weights_hash: of that model.
        plan_hash: of the plan as given.
        on_hash: content hash of the items.
        notes: how this model differs from the one that the plan's vectors were made on.
        metric_identity: differs between metrics of one name; None where a run did not note it.
    """

    rows: pd.DataFrame = field(repr=False)
    slope: float
    low: float
    high: float
    anti_steerable: float
    metric: str
    model: str
    weights_hash: str
    plan_hash: str
    on_hash: str
    notes: tuple[str, ...]
    metric_identity: str | None = None

    def _finding(self) -> str:
        return str(self).splitlines()[0]

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment._blocks.faces import frame_piece  # which draws

        means = self.rows.groupby("dose", as_index=False).value.mean().rename(columns={"value": self.metric})
        facts = [("model", self.model), ("weights", shortened(self.weights_hash)), ("plan", self.plan_hash)]
        return [Remarks(self.notes), frame_piece(means, "mean over items at each dose"), Facts(facts)]

    def __str__(self) -> str:
        doses = sorted(self.rows.dose.unique())
        slope = f"{self.metric} {with_ends(self.slope, self.low, self.high)} per unit of dose"
        where = f"from {doses[0]:g} to {doses[-1]:g} on {self.rows.item.nunique()} items, {self.model}"
        line = f"{slope}, {where}; falls on {self.anti_steerable:.0%} of them"
        return "\n".join([line, *self.notes])


def transfer(
    engine: Engine,
    plan: Plan,
    on: Targets,
    doses: Sequence[float],
    *,
    metric: "str | Metric" = "log_prob_margin",
    level: float = 0.95,
) -> Transfer:
    """Runs a plan where it was not made: on other items, another model of the same width, or both.

    Doses of a vector that was made on other weights are measured anew, so a dose means the same share of the stream's
    norm on both models.

    Args:
        engine: the engine to run on.
        plan: the plan at scale 1.
        on: items to measure on.
        doses: at least two.
        metric: `log_prob_margin`, `choice_prob` or a function.
        level: coverage of the interval.

    Raises:
        VectorShapeError: for a model of another width.
        HookPointError: for a model without the plan's layers.

    Warns:
        UserWarning: once for each vector made on other weights, under another weight processing, or at another hook
            point; `notes` keeps the sentences.
    """
    name, measure = find_metric(metric)
    check_targets(on)
    values = check_doses(doses)
    notes = _notes(engine, plan)
    resolved = plan.resolved(engine.median_norm, engine.info.weights_hash)  # so that a hash names what is added
    for note in notes:
        warn(note)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="About ")  # given above, once
        plans = [None if dose == 0 else resolved.scaled(dose) for dose in values]
        table = item_values(engine, plans, on, measure)
    slopes = least_squares_slopes(np.array(values), table.T)
    interval = cluster_t_mean(slopes, on.groups, level=level)
    rows = pd.DataFrame(
        {
            "dose": np.repeat(values, len(on)),
            "item": np.tile(np.arange(len(on)), len(values)),
            "group": on.groups * len(values),
            "value": table.ravel(),
        }
    )
    return Transfer(
        rows=rows,
        slope=float(slopes.mean()),
        low=interval.low,
        high=interval.high,
        anti_steerable=float((slopes < 0).mean()),
        metric=name,
        metric_identity=metric_identity(metric),
        model=engine.info.name,
        weights_hash=engine.info.weights_hash,
        plan_hash=plan.hash,
        on_hash=on.hash,
        notes=tuple(notes),
    )


def compare_transfers(transfers: Mapping[str, Transfer]) -> pd.DataFrame:
    """A row per transfer, the first one being the source that the others are compared with.

    Returns:
        `name`, `slope`, `low`, `high`, `anti_steerable`, `retained` (slope over the source's slope; NaN if that is 0),
        `model`, `weights_hash`, `on_hash`, `metric`, `notes`.
    """
    source = next(iter(transfers.values())).slope
    columns = ["slope", "low", "high", "anti_steerable", "model", "weights_hash", "on_hash", "metric"]
    rows = [
        {"name": name, **{column: getattr(one, column) for column in columns}, "notes": " ".join(one.notes)}
        for name, one in transfers.items()
    ]
    frame = pd.DataFrame(rows)
    frame.insert(5, "retained", frame.slope / source if source else math.nan)
    return frame


def _notes(engine: Engine, plan: Plan) -> list[str]:
    """What `Plan.check` warns of, each sentence once.

    Raises:
        VectorShapeError, HookPointError: for a model that the plan does not fit.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.check(engine.info)
    return list(dict.fromkeys(str(warning.message) for warning in caught))


def measure_transfer(
    run: Run,
    plan: Plan,
    targets: Targets,
    doses: Sequence[float],
    *,
    engine: Engine | None,
    metric: "str | Metric",
) -> Transfer:
    """See `steerlab.experiment.Experiment.transfer`."""
    session = run.session
    check_plan(plan)
    if not (engine is None or isinstance(engine, Engine)):
        raise InputError(f"engine is an engine, e.g. sl.load(…), got {shown(engine)}.")
    session.open()
    used, doses = cell_engine_for(session, engine), check_doses(doses)
    run_by = session.engine_hash if engine is None else Fingerprint.of(engine, {}).hash
    with run.measuring("transfer", lambda: ([targets], [plan.hash, doses, metric_identity(metric), run_by])):
        found = transfer(used, plan, targets, doses, metric=metric)
    return run.keep("transfer", [plan.hash, targets.hash, doses, metric_identity(metric), run_by], found)


def transfer_sections(transfers: Sequence[Transfer], effects: Sequence[Effect]) -> list[Section]:
    """One section of all transfers, with a table of them if there are several.

    Args:
        transfers: in the order in which they were measured.
        effects: of this experiment, some with the same plans.
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
    """A row per transfer: where it ran, its slope with interval, and its share of the plan's effect."""
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
    """What a plan does on other items or another model, how that model differs, and the means per dose."""
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
    """The slope as a share of that of the plan's effect; NaN if there is none to compare with."""
    if home is None or not math.isfinite(home.slope) or home.slope == 0:
        return math.nan
    return transfer.slope / home.slope


def _percent(share: float) -> str:
    return MISSING if math.isnan(share) else f"{number(100 * share, '.0f')}\u00a0%"


def _sections(m: Material) -> list[Section]:
    return transfer_sections(m.of("transfers"), m.of("effects"))


TRANSFER = Measurement(finding_kind("transfer", "transfers", Transfer), _sections)
