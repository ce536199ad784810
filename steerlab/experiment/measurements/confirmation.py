"""Confirm: what a selection found, measured on held-out items, and how often they have been looked at."""

import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError
from steerlab.core.targets import Targets
from steerlab.display import Piece, Shown
from steerlab.experiment._blocks import Block, Paragraph, Section, Verdict
from steerlab.experiment._blocks.findings import Finding, finding_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._store.cell_engine import cell_engine_for
from steerlab.experiment._store.looks import Look, Looks, content_hashes, prompt_hash
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._wording import in_figures, with_ends
from steerlab.experiment.measurements._checks import check_targets
from steerlab.experiment.measurements._item_values import item_values
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.controls import Arm, Controls, control_arms
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.experiment.measurements.preregistration import preregistered
from steerlab.experiment.measurements.selection import Selection
from steerlab.measures.intervals import cluster_t_mean, null_rank


@dataclass(frozen=True, repr=False)
class Confirmation(Shown):
    """A selected plan measured on held-out items.

    Attributes:
        selection: what was selected: vector, layer and dose in words.
        plan_hash: hash of the plan.
        metric: name of the metric.
        gain: mean change of the metric over the held-out items.
        low: lower end of its interval, Student's t over groups; NaN for one group.
        high: upper end.
        dev_gain: the gain on the development items, as selected; in `dev_metric`.
        anti_steerable: share of held-out items whose metric falls.
        null_ranks: per null family, the share of draws at least as large, the plan counted in.
        num_items: held-out items.
        on_hash: content hash of the held-out items.
        prompts: hashes of their prompts, and of each prompt with a target after it.
        look: 1 if nothing was measured on any of these items before, 2 for the second look, and so on.
        overlap: held-out items whose prompt or group was among the development items, allowed by the caller.
        rows: a row per item: `item`, `group`, `base_value`, `value`, `change`.
        nulls: a row per control draw: `family`, `draw`, `gain`.
        dev_metric: name of the metric of the selection; None where a run did not note it.
        preregistration: hash of the plan of analysis that was written for these items; None without one.
        departures: every entry in which this is not what was planned there.
        is_dev_metric: whether both are the same, which two functions of one name are not; None where a run did not note
            it, and the names decide.
    """

    selection: str
    plan_hash: str
    metric: str
    gain: float
    low: float
    high: float
    dev_gain: float
    anti_steerable: float
    null_ranks: Mapping[str, float]
    num_items: int
    on_hash: str
    prompts: frozenset[str] = field(repr=False)
    look: int
    overlap: int
    rows: pd.DataFrame = field(repr=False)
    nulls: pd.DataFrame = field(repr=False)
    dev_metric: str | None = None
    is_dev_metric: bool | None = None
    preregistration: str | None = None
    departures: tuple[str, ...] = ()

    @property
    def _is_comparable(self) -> bool:
        """Whether the gain on the development items can be set beside the gain here."""
        return self.dev_metric == self.metric if self.is_dev_metric is None else self.is_dev_metric

    @property
    def notes(self) -> list[str]:
        """What a reader must know before believing the figure, one sentence each."""
        found = []
        if self.dev_metric is not None and not self._is_comparable:
            other = f"another function named {self.metric}" if self.dev_metric == self.metric else self.dev_metric
            found.append(
                f"The plan was selected by {other}, so its gain on the development items is no figure to set beside "
                f"this {self.metric}."
            )
        if self.look > 1:
            found.append(
                f"This is look {self.look} at these held-out items; choosing among looks is selection again, and only "
                "the first is a clean test."
            )
        if self.overlap:
            found.append(f"{self.overlap} of {self.num_items} items share prompt or group with the development items.")
        if math.isnan(self.low):
            found.append("All items share one group, so no interval exists; use items of several groups.")
        found += [f"Not as preregistered. {departure}" for departure in self.departures]
        if not self.null_ranks:
            found.append("No null family was run, so nothing tells this from a random direction.")
        return found

    def _finding(self) -> str:
        return str(self).splitlines()[0]

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment._blocks.faces import finding_pieces  # which draws

        return finding_pieces(confirmation_finding(self, ""))

    def __str__(self) -> str:
        ranks = "".join(f", rank {rank:.3f} against {family}" for family, rank in self.null_ranks.items())
        figures = f"{self.metric} {with_ends(self.gain, self.low, self.high)}"
        before = f" ({in_figures(self.dev_gain, '+', 3)} on development items)" if self._is_comparable else ""
        line = f"{self.selection}: {figures} on {self.num_items} held-out items{before}{ranks}"
        return "\n".join([line, *self.notes])


def confirm(
    engine: Engine,
    best: Selection,
    on: Targets,
    *,
    metric: "str | Metric | None" = None,
    earlier: Sequence[Look | Confirmation] = (),
    allow_overlap: bool = False,
    controls: Controls | None = None,
    pairs: ContrastPairs | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Confirmation:
    """Measures the selected plan on held-out items.

    Args:
        engine: the engine.
        best: what `select` found.
        on: items that the selection has not seen.
        metric: as in the selection by default; a function must be passed again.
        earlier: whatever was measured before, on any items; what shares a held-out prompt counts as an earlier look.
        allow_overlap: measure although items share prompts or groups with the development items; it is noted.
        controls: null families to rank the gain against; none by default.
        pairs: the pairs the vectors were extracted from, for label-flip controls.
        level: coverage of the interval.
        seed: of controls.

    Raises:
        DataError: if held-out items share a prompt or a group with the development items.
        InputError: for a metric that must be passed again.
    """
    overlap = _overlap(best, on)
    if overlap and not allow_overlap:
        shown = ", ".join(textwrap.shorten(repr(on.items[i].prompt), 60, placeholder=" …") for i in overlap[:3])
        raise DataError(
            f"{len(overlap)} of {len(on)} held-out items share prompt or group with the development items "
            f"(e.g. {shown}). Confirm on other items, or pass allow_overlap=True, which is noted."
        )
    if metric is None and best.metric_identity not in (None, best.metric):
        raise InputError(f"The selection's metric {best.metric!r} is a function; pass it again as metric=.")
    chosen = best.metric if metric is None else metric
    name, measure = find_metric(chosen)
    resolved = best.plan.check(engine.info).resolved(engine.median_norm, engine.info.weights_hash)
    base, value = item_values(engine, [None, resolved], on, measure)
    change, contents = value - base, content_hashes(on)
    nulls = pd.DataFrame(columns=["family", "draw", "gain"])
    if controls is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="About ")  # a wrong layer is another place on purpose
            arms = control_arms(engine, resolved, controls, pairs=pairs, seed=seed)
            nulls = _null_gains(engine, arms, base, on, measure)
    interval = cluster_t_mean(change, on.groups, level=level)
    return Confirmation(
        selection=f"{best.vector_name} at layer {best.layer}, dose {best.dose:g}",
        plan_hash=best.plan.hash,
        metric=name,
        gain=float(change.mean()),
        low=interval.low,
        high=interval.high,
        dev_gain=best.gain,
        anti_steerable=float((change < 0).mean()),
        null_ranks=_ranks(float(change.mean()), nulls),
        num_items=len(on),
        on_hash=on.hash,
        prompts=contents,
        look=1 + sum(bool(seen.prompts & contents) for seen in earlier),
        overlap=len(overlap),
        rows=pd.DataFrame(
            {"item": range(len(on)), "group": on.groups, "base_value": base, "value": value, "change": change}
        ),
        nulls=nulls,
        dev_metric=best.metric,
        is_dev_metric=None if best.metric_identity is None else metric_identity(chosen) == best.metric_identity,
    )


def _null_gains(engine: Engine, arms: Sequence[Arm], base: np.ndarray, on: Targets, metric: Metric) -> pd.DataFrame:
    values = item_values(engine, [arm.plan for arm in arms], on, metric) if arms else []
    rows = [(arm.family, arm.draw, float((found - base).mean())) for arm, found in zip(arms, values, strict=True)]
    return pd.DataFrame(rows, columns=["family", "draw", "gain"])


def _ranks(gain: float, nulls: pd.DataFrame) -> dict[str, float]:
    """Ranks of the families that are nulls; a wrong layer is shown, not ranked."""
    parts = {str(family): part.gain.to_numpy() for family, part in nulls.groupby("family", sort=False)}
    return {family: null_rank(gain, gains) for family, gains in parts.items() if family != "wrong_layer"}


def _overlap(best: Selection, on: Targets) -> list[int]:
    return [
        index for index, item in enumerate(on) if prompt_hash(item.prompt) in best.prompts or item.group in best.groups
    ]


def measure_confirmation(
    run: Run,
    best: Selection,
    on: Targets,
    *,
    metric: "str | Metric | None",
    controls: Controls | None,
    pairs: ContrastPairs | None,
    allow_overlap: bool,
) -> Confirmation:
    """See `steerlab.experiment.Experiment.confirm`."""
    if not isinstance(best, Selection):
        raise InputError(f"confirm takes what select found, a Selection, got {type(best).__name__}.")
    check_targets(on)
    run.session.open()
    identity = (best.metric_identity or best.metric) if metric is None else metric_identity(metric)
    planned = preregistered(run, on)
    if planned is not None and controls is None:
        controls = Controls(**planned.controls)
    asked = None if controls is None else asdict(controls)
    what = [best.plan.hash, best.on_hash, on.hash, identity, asked, None if pairs is None else pairs.hash]
    known = run.find("confirmation", what)
    if known is not None:
        return known
    departures = () if planned is None else tuple(planned.departures_of(best.plan, on, str(identity), controls))
    own = Looks.key("confirm", [on], what)  # of this call, if an interrupt ended it before
    earlier = [look for look in all_looks(run) if not (isinstance(look, Look) and look.key == own)]
    with run.measuring("confirm", lambda: ([on], what)):
        found = confirm(
            cell_engine_for(run.session),
            best,
            on,
            metric=metric,
            earlier=earlier,
            allow_overlap=allow_overlap,
            controls=controls,
            pairs=pairs,
            seed=run.session.seed,
        )
    if planned is not None:
        found = replace(found, preregistration=planned.hash, departures=departures)
    return run.keep("confirmation", what, found)


def all_looks(run: Run) -> list[Look | Confirmation]:
    """Every look at items or texts so far; a run of a version that recorded no looks counts its confirmations."""
    found = run.session.looks.listed()
    confirmations = run.results.confirmations
    unrecorded = len(confirmations) - sum(look.kind == "confirm" for look in found)
    return [*confirmations[: max(0, unrecorded)], *found]


def confirmation_finding(confirmation: Confirmation, place: str) -> Finding:
    """The gain on held-out items, and what to know before believing it."""
    sentences = [f"Look {confirmation.look}: {str(confirmation).splitlines()[0]}.", *confirmation.notes]
    items: Any = confirmation.rows
    ordered = items.sort_values("change")
    return Finding(sentences, ordered, place=place, caption="Held-out items, from the most anti-steerable on")


def _sections(m: Material) -> list[Section]:
    title = "Confirmation on held-out items"
    found = [
        confirmation_finding(one, f"findings/confirmation-{k:03d}/rows.parquet")
        for k, one in enumerate(m.of("confirmations"))
    ]
    sections = finding_sections(title, found, "Confirmation")
    return [Section(title, [_look_count(m), *section.blocks]) for section in sections]


def _look_count(m: Material) -> Block:
    """How often the items of a confirmation were measured on, and by what, whether before it or after."""
    confirmations = m.of("confirmations")
    found = [[look for look in m.looks or confirmations if look.prompts & one.prompts] for one in confirmations]
    looks = max(found, key=len)
    most = max(len(looks), *(one.look for one in confirmations))
    if most == 1:
        return Paragraph("Held-out items were looked at once.")
    kinds = Counter("confirm" if isinstance(look, Confirmation) else look.kind for look in looks)
    told = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    reasons = [
        f"They were measured on by {told}." if len(looks) == most else "",
        "Only a confirmation that is the first look is one; whatever looked before makes it selection again.",
    ]
    return Verdict(f"{most} looks at the same held-out items", "bad", list(filter(None, reasons)))


CONFIRMATION = Measurement(finding_kind("confirmation", "confirmations", Confirmation), _sections)
