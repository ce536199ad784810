"""Preregistrations: what will be measured and how it will be judged, written before the data, beside what was done."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core._hashing import content_hash
from steerlab.core._numbers import check_number
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import InputError, RunError
from steerlab.core.targets import Targets
from steerlab.display import Facts, Piece, Remarks, Shown
from steerlab.experiment._blocks import Block, Bullets, Paragraph, Section, Verdict
from steerlab.experiment._blocks.findings import numbered
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import table_of
from steerlab.experiment._store.findings import read_finding
from steerlab.experiment._store.inputs import texts_hash
from steerlab.experiment._store.looks import content_hashes
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment.measurements._checks import check_doses, check_targets
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.controls import Controls, check_pairs
from steerlab.experiment.measurements.effect._measure import check_adjustment, check_smallest
from steerlab.experiment.measurements.effect._settings import EffectSettings
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.experiment.measurements.texts import neutral_texts
from steerlab.steering.plan import Plan

Rows = list[tuple[str, str, str]]
"""What, as planned, as done."""


@dataclass(frozen=True, repr=False)
class Preregistration(Shown):
    """What will be measured and how it will be judged, as it was written down.

    Attributes:
        question: what is asked, in words.
        plan: the plan at scale 1; None where `select` is to choose it.
        targets_hash: content hash of the items.
        num_items: how many there are.
        doses: factors the plan is scaled by.
        metric: name of the metric.
        metric_identity: the name, and for a function a hash of what it computes.
        smallest: the size of the smallest slope that matters; None for what random directions do.
        controls: draws of each control family.
        pairs_hash: of the pairs that label flips need.
        neutral_hash: of the texts that the cost is measured on.
        max_ppl_ratio: doses that cost more enter no fit.
        adjustment: how ranks of several plans are adjusted.
        level: coverage of the interval.
        rule: which rule gives the verdict.
        seed: of controls.
        weights_hash: of the model.
        earlier_looks: how often these items had been measured on when it was written.
        time: when it was written, UTC.
        hash: of all of the above.
    """

    question: str
    plan: Plan | None
    targets_hash: str
    num_items: int
    doses: tuple[float, ...]
    metric: str
    metric_identity: str
    smallest: float | None
    controls: Mapping[str, Any]
    pairs_hash: str | None
    neutral_hash: str
    max_ppl_ratio: float
    adjustment: str
    level: float
    rule: int
    seed: int
    weights_hash: str
    earlier_looks: int
    time: str
    hash: str = field(default="")

    def __post_init__(self) -> None:
        if not self.hash:
            object.__setattr__(self, "hash", self.found_hash)

    @property
    def found_hash(self) -> str:
        """The hash of what is written here; `hash` was computed when it was written."""
        stated = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("hash", "plan")}
        stated |= {"plan": None if self.plan is None else self.plan.hash, "doses": list(self.doses)}
        return content_hash(stated | {"controls": dict(self.controls), "max_ppl_ratio": repr(self.max_ppl_ratio)})

    def planned(self) -> dict[str, str]:
        """What was planned, in words, by name."""
        return {
            "plan": "the one that select chooses" if self.plan is None else f"{self.plan} ({self.plan.hash})",
            "items": f"{self.num_items} ({self.targets_hash})",
            "doses": _doses(self.doses),
            "metric": self.metric_identity,
            "smallest slope that matters": _smallest(self.smallest),
            "control draws": _draws(self.controls),
            "pairs of the label flips": str(self.pairs_hash),
            "neutral texts": self.neutral_hash,
            "bound on the cost": _exact(self.max_ppl_ratio),
            "level": _exact(self.level),
            "rule of the verdict": str(self.rule),
            "adjustment": self.adjustment,
            "seed": str(self.seed),
            "model": self.weights_hash,
        }

    def beside(self, effect: Effect) -> Rows:
        """What was planned beside what an effect did, a row per entry."""
        settings, data, planned = effect.settings, effect.provenance, self.planned()
        draws = self._draws_beside(effect)
        flips = data.get("pairs_hash") if self.controls.get("shuffled") or draws.get("shuffled") else None
        done = {
            "plan": planned["plan"] if self.plan is None else f"{effect.plan_text} ({effect.plan_hash})",
            "items": f"{len(effect.item_slopes)} ({data.get('targets_hash')})",
            "doses": _doses(effect.doses),
            "metric": settings.metric_identity,
            "smallest slope that matters": _smallest(settings.smallest),
            "control draws": _draws(draws),
            "pairs of the label flips": str(flips),
            "neutral texts": str(data.get("neutral_hash")),
            "bound on the cost": _exact(settings.max_ppl_ratio),
            "level": _exact(settings.level),
            "rule of the verdict": str(settings.rule),
            "adjustment": settings.adjustment,
            "seed": str(settings.seed),
            "model": str(data.get("weights_hash")),
        }
        return [(name, value, done[name]) for name, value in planned.items()]

    def _draws_beside(self, effect: Effect) -> Mapping[str, Any]:
        """Control draws that an effect ran, by family; those planned, where no two doses were within the cost."""
        if len(effect.fitted_doses) < 2:
            return self.controls
        found: Any = effect.null_slopes.groupby("family").size()
        return {str(family): int(n) for family, n in found.items()}

    def departures(self, effect: Effect) -> list[str]:
        """Every entry in which an effect is not what was planned, a sentence each; empty if it is."""
        return [_departure(*row) for row in self.beside(effect) if row[1] != row[2]]

    def departures_of(self, plan: Plan, targets: Targets, metric: str, controls: Controls | None) -> list[str]:
        """As `departures`, for one plan at its strength on held-out items, as `confirm` measures it."""
        rows = [
            ("items", self.targets_hash, targets.hash),
            ("metric", self.metric_identity, metric),
            ("control draws", _draws(self.controls), _draws({} if controls is None else asdict(controls))),
        ]
        found = [_departure(*row) for row in rows if row[1] != row[2]]
        if self.plan is not None and plan.hash not in {self.plan.hash, *(self.plan.scaled(d).hash for d in self.doses)}:
            found.insert(0, _departure("plan", f"{self.plan} at one of the doses", str(plan)))
        return found

    @property
    def notes(self) -> list[str]:
        """What a reader must know before believing that this came before the data."""
        if not self.earlier_looks:
            return []
        times = "once" if self.earlier_looks == 1 else f"{self.earlier_looks} times"
        return [f"It was written after these items had been measured on {times}, so it is no plan before the data."]

    def __str__(self) -> str:
        return "\n".join([self._finding(), *self.notes])

    def _finding(self) -> str:
        return f"preregistered {self.time}: {self.question} [{self.hash[:12]}]"

    def _pieces(self) -> Sequence[Piece]:
        return [Remarks(self.notes), Facts(list(self.planned().items()))]


def _exact(number: float) -> str:
    """The number with as many digits as tell it from any other."""
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def _doses(doses: Sequence[float]) -> str:
    return ", ".join(map(_exact, sorted(doses)))


def _smallest(smallest: float | None) -> str:
    return "what random directions do" if smallest is None else _exact(smallest)


def _draws(controls: Mapping[str, Any]) -> str:
    return ", ".join(f"{int(n)} {family}" for family, n in sorted(controls.items()) if int(n)) or "none"


def _departure(what: str, planned: str, done: str) -> str:
    return f"Not as planned, {what}: planned {planned}; done {done}."


def measure_preregistration(
    run: Run,
    question: str,
    plan: Plan | None,
    targets: Targets,
    doses: Sequence[float],
    *,
    metric: "str | Metric",
    smallest: float | None,
    controls: Controls,
    pairs: ContrastPairs | None,
    max_ppl_ratio: float,
    neutral: Sequence[PromptLike] | None,
    adjust: str,
) -> Preregistration:
    """See `steerlab.experiment.Experiment.preregister`."""
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"question says in words what is asked, got {question!r:.60}.")
    if plan is not None and not (isinstance(plan, Plan) and len(plan)):
        raise InputError(f"plan is a plan with edits, or None where select is to choose it; got {plan!r:.60}.")
    if not isinstance(controls, Controls):
        raise InputError(f"controls is e.g. sl.Controls(random=20), got {controls!r:.60}.")
    check_targets(targets)
    check_pairs(controls, pairs)
    name, _ = find_metric(metric)
    settings = EffectSettings(smallest=check_smallest(smallest), adjustment=check_adjustment(adjust))
    stated: dict[str, Any] = {
        "question": question.strip(),
        "plan": plan,
        "targets_hash": targets.hash,
        "num_items": len(targets),
        "doses": tuple(sorted(check_doses(doses))),
        "metric": name,
        "metric_identity": metric_identity(metric),
        "smallest": settings.smallest,
        "controls": asdict(controls),
        "pairs_hash": pairs.hash if pairs is not None and controls.shuffled else None,
        "neutral_hash": texts_hash(neutral_texts(neutral)),
        "max_ppl_ratio": check_number(max_ppl_ratio, "max_ppl_ratio", least=1, infinite=True),
        "adjustment": settings.adjustment,
        "level": settings.level,
        "rule": settings.rule,
    }
    run.session.open()
    what = {**stated, "plan": None if plan is None else plan.hash, "max_ppl_ratio": repr(stated["max_ppl_ratio"])}
    known = run.find("preregistration", what)
    if known is not None:
        return known
    contents = content_hashes(targets)
    looks = sum(bool(look.prompts & contents) for look in run.session.looks.listed())
    found = Preregistration(
        **stated,
        seed=run.session.seed,
        weights_hash=run.session.info.weights_hash,
        earlier_looks=looks,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return run.keep("preregistration", what, found)


def preregistered(run: Run, targets: Targets) -> Preregistration | None:
    """The last preregistration for these items; None if there is none."""
    found = [one for one in run.results.preregistrations if one.targets_hash == targets.hash]
    return found[-1] if found else None


def check_preregistration(folder: Path) -> None:
    """Checks that a preregistration is what was written.

    Raises:
        RunError: if its hash does not follow from it: it was changed afterwards.
    """
    found = read_finding(folder, Preregistration)
    if found.hash != found.found_hash:
        raise RunError(f"it states the hash {found.hash}, and what it says gives {found.found_hash}")


def _sections(m: Material) -> list[Section]:
    parts = [_blocks(one, m.of("effects")) for one in m.of("preregistrations")]
    return numbered("Plan of analysis, written before the data", parts, "Plan of analysis")


def _blocks(one: Preregistration, effects: Sequence[Effect]) -> list[Block]:
    """The plan beside the effect that is closest to it, and every departure."""
    head: list[Block] = [Paragraph(f"{one.question} Written {one.time}; hash {one.hash}.")]
    head += [Verdict("Not before the data", "bad", one.notes)] if one.notes else []
    same_items = [effect for effect in effects if effect.provenance.get("targets_hash") == one.targets_hash]
    if not effects:
        facts = pd.DataFrame(list(one.planned().items()), columns=["what", "planned"])
        return [*head, Paragraph("No effect has been measured yet."), table_of(facts, "What was planned")]
    closest = min(same_items or effects, key=lambda effect: len(one.departures(effect)))
    departures = one.departures(closest)
    number = next(k for k, effect in enumerate(effects, start=1) if effect is closest)
    told = f"Effect {number} was measured as planned." if not departures else f"Departures of effect {number}:"
    table = pd.DataFrame(one.beside(closest), columns=["what", "planned", "done"])
    others = sum(effect is not closest for effect in same_items)
    more = [Paragraph(f"{others} further effects on these items were not planned here.")] if others else []
    listed = [Bullets(departures)] if departures else []
    return [*head, Paragraph(told), *listed, *more, table_of(table, "What was planned, and what was done")]


PREREGISTRATION = Measurement(
    finding_kind("preregistration", "preregistrations", Preregistration), _sections, check=check_preregistration
)
