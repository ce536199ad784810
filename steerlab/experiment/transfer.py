"""Transfer: the same plan on other data, or on another model of the same width."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from steerlab.core.engine import Engine
from steerlab.core.targets import Targets
from steerlab.experiment.item_values import item_values
from steerlab.experiment.metrics import Metric, find_metric, metric_identity
from steerlab.experiment.sweep import check_doses, check_targets
from steerlab.measures.intervals import cluster_bootstrap_mean, least_squares_slopes
from steerlab.steering.plan import Plan


@dataclass(frozen=True)
class Transfer:
    """What a plan does on one model and one set of items.

    Attributes:
        rows: a row per dose and item: `dose`, `item`, `group`, `value`.
        slope: mean least-squares slope of the metric per item.
        low: lower end of its bootstrap interval, items resampled by group; NaN for one group.
        high: upper end.
        anti_steerable: share of items whose slope is below 0.
        metric: name of the metric.
        model: name of the model it ran on.
        weights_hash: of that model.
        plan_hash: of the plan as given.
        on_hash: content hash of the items.
        notes: how this model differs from the one that the plan's vectors were made on.
        metric_identity: what tells the metric from another of its name; None where a run did not note it.
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

    def __str__(self) -> str:
        doses = sorted(self.rows.dose.unique())
        slope = f"{self.metric} {self.slope:+.3f} [{self.low:+.3f}, {self.high:+.3f}] per unit of dose"
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
    n_resamples: int = 4000,
    seed: int = 0,
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
        n_resamples: bootstrap draws.
        seed: of the draws.

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
        warnings.warn(note, UserWarning, stacklevel=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="About ")  # said already, once
        plans = [None if dose == 0 else resolved.scaled(dose) for dose in values]
        table = item_values(engine, plans, on, measure)
    slopes = least_squares_slopes(np.array(values), table.T)
    interval = cluster_bootstrap_mean(slopes, on.groups, level=level, n_resamples=n_resamples, seed=seed)
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
