"""Interaction: what two plans do together beyond the sum of what each does alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core._numbers import as_list, as_number, shown
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.targets import Targets
from steerlab.display import Grid, Piece, Remarks, Shown, diverging, figure, interval
from steerlab.experiment._blocks import Section
from steerlab.experiment._blocks.findings import Finding, finding_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._wording import in_figures, metric_label, with_ends
from steerlab.experiment.measurements._checks import check_targets
from steerlab.experiment.measurements._item_values import item_values
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.measures._interactions import interaction_residuals
from steerlab.measures.intervals import cluster_t_mean
from steerlab.steering.plan import Plan


@dataclass(frozen=True, repr=False)
class Interaction(Shown):
    """A grid of two plans at several scales, and how far it is from additive.

    Attributes:
        rows: a row per item and cell: `item`, `group`, `scale_a`, `scale_b`, `value` (the metric), `change` (from the
            unsteered model) and `interaction` (change − change of a alone − change of b alone).
        table: a row per cell: `scale_a`, `scale_b`, means `value`, `change`, `expected` (the sum of both alone) and
            `interaction`, its interval `low` and `high` by Student's t over groups of items, `plan_hash`. Interval
            ends are NaN where the interaction is 0 by definition, and with a single group.
        metric: name of the metric.
        plan_a: the first plan in words.
        plan_b: the second plan in words.
        on_hash: content hash of the items.
    """

    rows: pd.DataFrame = field(repr=False)
    table: pd.DataFrame = field(repr=False)
    metric: str
    plan_a: str
    plan_b: str
    on_hash: str

    def grid(self, column: str = "interaction") -> pd.DataFrame:
        """One column of the table as a grid: scales of a down, of b across."""
        return self.table.pivot(index="scale_a", columns="scale_b", values=column)

    def _finding(self) -> str:
        cells = self.table[(self.table.scale_a != 0) & (self.table.scale_b != 0)]
        if cells.empty:
            return f"{self.metric}, no cell with both plans"
        largest: Any = cells.loc[cells.interaction.abs().idxmax()]
        where = f"at {largest.scale_a:g} × a and {largest.scale_b:g} × b"
        ends = interval(float(largest.low), float(largest.high))
        return f"{self.metric}, largest interaction {figure(largest.interaction)} {ends} {where}"

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment._blocks.faces import finding_pieces  # which draws

        grid = self.grid()
        down, across = ([f"{scale:g} × {plan}" for scale in side] for plan, side in (("a", grid.index), ("b", grid)))
        values = grid.to_numpy(dtype=float)
        cells = Grid(down, across, values, diverging(values.ravel().tolist()), metric_label(self.metric))
        _, *table = finding_pieces(interaction_finding(self))
        return [Remarks([f"a: {self.plan_a}", f"b: {self.plan_b}"]), cells, *table]

    def __str__(self) -> str:
        lines = [
            f"{row['scale_a']:g} × a and {row['scale_b']:g} × b: {in_figures(row['change'], '+', 3)}, expected "
            f"{in_figures(row['expected'], '+', 3)}, interaction "
            f"{with_ends(row['interaction'], row['low'], row['high'])}"
            for row in self.table.to_dict("records")
            if row["scale_a"] != 0 and row["scale_b"] != 0
        ]
        return "\n".join([f"{self.metric} of {self.plan_a} (a) with {self.plan_b} (b)", *lines])


def interaction(
    engine: Engine,
    plan_a: Plan,
    plan_b: Plan,
    on: Targets,
    *,
    scales_a: Sequence[float] = (0.0, 1.0),
    scales_b: Sequence[float] = (0.0, 1.0),
    metric: "str | Metric" = "log_prob_margin",
    level: float = 0.95,
) -> Interaction:
    """Runs `plan_a.scaled(i) + plan_b.scaled(j)` for every pair of scales and compares with an additive model.

    Args:
        engine: the engine.
        plan_a: the first plan; its edits apply first where both act at one hook point.
        plan_b: the second plan.
        on: items to measure on.
        scales_a: scales of the first plan, 0 among them.
        scales_b: scales of the second plan, 0 among them.
        metric: `log_prob_margin`, `choice_prob` or a function.
        level: coverage of the intervals.

    Raises:
        InputError: if 0 is not among the scales, or a scale stands twice.
        PlanError: if edits of the two plans contradict each other.
    """
    first, second = check_scales("scales_a", scales_a), check_scales("scales_b", scales_b)
    name, measure = find_metric(metric)
    cells = [(a, b) for a in first for b in second]
    plans = [combined(plan_a, a, plan_b, b) for a, b in cells]
    values = item_values(engine, plans, on, measure)
    grid = values.T.reshape(len(on), len(first), len(second))
    residuals = interaction_residuals(grid, first.index(0), second.index(0)).reshape(len(on), len(cells))
    base = values[cells.index((0.0, 0.0))]
    rows = pd.DataFrame(
        {
            "item": np.tile(np.arange(len(on)), len(cells)),
            "group": on.groups * len(cells),
            "scale_a": np.repeat([a for a, _ in cells], len(on)),
            "scale_b": np.repeat([b for _, b in cells], len(on)),
            "value": values.ravel(),
            "change": (values - base).ravel(),
            "interaction": residuals.T.ravel(),
        }
    )
    hashes = ["" if plan is None else plan.hash for plan in plans]
    return Interaction(rows, _table(rows, hashes, level), name, str(plan_a), str(plan_b), on.hash)


def combined(plan_a: Plan, scale_a: float, plan_b: Plan, scale_b: float) -> Plan | None:
    """Both plans at their scales; a plan at scale 0 is left out, and with both it is the unsteered model."""
    parts = [plan.scaled(scale) for plan, scale in ((plan_a, scale_a), (plan_b, scale_b)) if scale != 0]
    return Plan(*(edit for part in parts for edit in part)) if parts else None


def _table(rows: pd.DataFrame, hashes: list[str], level: float) -> pd.DataFrame:
    found = []
    for (a, b), part in rows.groupby(["scale_a", "scale_b"], sort=False):  # pyright: ignore[reportGeneralTypeIssues]
        low = high = np.nan
        if a != 0 and b != 0:
            interval = cluster_t_mean(part.interaction.to_numpy(), part.group.tolist(), level=level)
            low, high = interval.low, interval.high
        means = (part.value.mean(), part.change.mean(), (part.change - part.interaction).mean())
        found.append((a, b, *means, part.interaction.mean(), low, high))
    columns = ["scale_a", "scale_b", "value", "change", "expected", "interaction", "low", "high"]
    return pd.DataFrame(found, columns=columns).assign(plan_hash=hashes)


def check_scales(name: str, scales: Sequence[float]) -> list[float]:
    """Sorted scales, if 0 and another one are among them, each once.

    Raises:
        InputError: otherwise.
    """
    found = [as_number(scale) for scale in as_list(scales) or ()]
    values = [value for value in found if value is not None]
    if 0 not in values or len(values) < 2 or len(set(values)) < len(found):
        raise InputError(f"{name} holds 0 (the baseline) and at least one other scale, each once; got {shown(scales)}.")
    return sorted(values)


def measure_interaction(
    run: Run,
    plan_a: Plan,
    plan_b: Plan,
    targets: Targets,
    doses_a: Sequence[float],
    doses_b: Sequence[float],
    *,
    metric: "str | Metric",
) -> Interaction:
    """See `steerlab.experiment.Experiment.interaction`."""
    session = run.session
    check_targets(targets)
    session.open()
    first, second = resolved(session, plan_a), resolved(session, plan_b)
    scales: dict[str, Any] = {
        "scales_a": check_scales("doses_a", doses_a),
        "scales_b": check_scales("doses_b", doses_b),
    }
    asked = [plan_a.hash, plan_b.hash, metric_identity(metric), scales]
    with run.measuring("interaction", lambda: ([targets], asked)):
        engine = cell_engine_for(session)
        found = interaction(engine, first, second, targets, metric=metric, **scales)
    return run.keep("interaction", [first.hash, second.hash, targets.hash, metric_identity(metric), scales], found)


def interaction_finding(interaction: Interaction) -> Finding:
    """What two plans do together beyond the sum of what each does alone."""
    table = interaction.table.drop(columns="plan_hash").rename(
        columns={"low": "interaction_low", "high": "interaction_high"}
    )
    text = f"{interaction.metric} of {interaction.plan_a} (a) with {interaction.plan_b} (b)."
    return Finding(
        [text], table, caption="Means over items; interaction is what the sum of both alone does not explain"
    )


def _sections(m: Material) -> list[Section]:
    return finding_sections("Interaction of plans", [interaction_finding(one) for one in m.of("interactions")])


INTERACTION = Measurement(finding_kind("interaction", "interactions", Interaction), _sections)
