"""How an effect is measured, cell by cell: finished ones come from the run directory, others from the engine."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pandas as pd

from steerlab.core._numbers import check_number
from steerlab.core._progress import progress
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import InputError, PlanError, RunError
from steerlab.core.targets import Targets
from steerlab.experiment._store.batches import batch_plans, row_tokens, tokens_per_call_of
from steerlab.experiment._store.cells import Cell, ResumeNotice, StoredCell, join
from steerlab.experiment._store.inputs import texts_hash
from steerlab.experiment._store.plans import check_wired, resolved, stored_plan
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import Session
from steerlab.experiment.measurements._checks import check_doses, check_targets
from steerlab.experiment.measurements.controls import Arm, Controls, check_pairs, control_arms, labels_made
from steerlab.experiment.measurements.cost import perplexities
from steerlab.experiment.measurements.effect._figures import outermost
from steerlab.experiment.measurements.effect._rows import item_rows, score_plans
from steerlab.experiment.measurements.effect._settings import ADJUSTMENTS, EffectSettings
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.experiment.measurements.metrics import Metric, find_metric, metric_identity
from steerlab.experiment.measurements.texts import neutral_texts
from steerlab.steering.extraction.extract import library_versions
from steerlab.steering.operators import Add
from steerlab.steering.plan import Plan


def measure_effect(
    run: Run,
    plan: Plan,
    targets: Targets,
    doses: Sequence[float],
    *,
    controls: Controls,
    metric: "str | Metric",
    pairs: ContrastPairs | None,
    max_ppl_ratio: float,
    neutral: Sequence[PromptLike] | None,
    tokens_per_call: int | None,
    smallest: float | None,
    adjust: str,
) -> Effect:
    """See `steerlab.experiment.Experiment.effect`."""
    session, run_doses, texts = run.session, check_doses(doses), neutral_texts(neutral)
    own = None if neutral is None else texts
    bound = check_number(max_ppl_ratio, "max_ppl_ratio", least=1, infinite=True)
    judged = {"smallest": check_smallest(smallest), "adjustment": check_adjustment(adjust)}

    def asked() -> tuple[Sequence[Any], Any]:
        names = [metric_identity(metric), pairs and pairs.hash, bound]
        return [targets, own], [plan.hash, run_doses, asdict(controls), *names]

    with run.look("effect", asked):
        name, function = find_metric(metric)
        check_targets(targets)
        if isinstance(plan, Plan) and not len(plan):
            raise PlanError("The plan has no edits, so it can have no effect; add one, e.g. sl.add(vector, dose=1).")
        if not isinstance(controls, Controls):
            raise InputError(f"controls is e.g. sl.Controls(random=20), got {controls!r:.60}.")
        check_pairs(controls, pairs)
        session.open()
        ready = resolved(session, plan)
        session.inputs.add_targets(targets)
        if 0 not in run_doses:
            sys.stderr.write(
                "info: effect: dose 0 is not among the doses, so nothing will show the unsteered model; add 0 to see "
                "it\n"
            )
        with ResumeNotice(session.cells, "effect"):
            cost = perplexities(session, ready, texts, run_doses)
            allowed = [float(dose) for dose in cost[cost.ppl_ratio <= bound].dose]
            measured = partial(_rows, session, targets=targets, metric=function, tokens_per_call=tokens_per_call)
            rows = measured([(Arm("vector", 0, ready), dose) for dose in run_doses], "doses")
            if len(allowed) >= 2:
                arms = _arms(session, ready, controls, pairs)
                rows += measured([(arm, dose) for arm in arms for dose in outermost(allowed) if dose != 0], "controls")
        settings = EffectSettings(
            metric=name,
            metric_identity=metric_identity(metric),
            axis=_axis(plan),
            max_ppl_ratio=bound,
            seed=session.seed,
            **judged,
        )
        provenance = _provenance(session, plan, targets, pairs, texts)
        effect = Effect(join(rows), cost, plan.hash, str(plan), settings, provenance)
    return run.keep_as("effect", _key(session, effect, ready, controls), (effect, ready))[0]


def check_smallest(smallest: float | None) -> float | None:
    """The size of the smallest slope that matters, as a number above 0.

    Raises:
        InputError: for anything else.
    """
    if smallest is None:
        return None
    size = check_number(smallest, "smallest", least=0)
    if size == 0:
        raise InputError("smallest is the size of the smallest slope that matters, above 0; got 0.")
    return size


def check_adjustment(adjust: str) -> str:
    """The name of an adjustment of ranks.

    Raises:
        InputError: for another.
    """
    if adjust not in ADJUSTMENTS:
        raise InputError(f"adjust is one of {', '.join(map(repr, ADJUSTMENTS))}, got {adjust!r:.60}.")
    return adjust


def _rows(
    session: Session,
    work: Sequence[tuple[Arm, float]],
    description: str,
    *,
    targets: Targets,
    metric: Metric,
    tokens_per_call: int | None,
) -> list[pd.DataFrame]:
    """Result rows of arms at doses; `description` names the progress bar."""
    hashes = {
        "data_hash": targets.hash,
        "model_hash": session.info.weights_hash,
        "engine_hash": session.engine_hash,
    }
    with warnings.catch_warnings():
        if description == "controls":
            warnings.filterwarnings("ignore", message="About SteeringVector")
        frames = _scores(session, work, targets, tokens_per_call, description)
    return [item_rows(f, arm, dose, targets, metric, hashes) for f, (arm, dose) in zip(frames, work, strict=True)]


def _scores(
    session: Session, arms: Sequence[tuple[Arm, float]], targets: Targets, tokens_per_call: int | None, description: str
) -> list[pd.DataFrame]:
    """Scores of all targets for each arm at its dose, as `score_plans` gives them.

    Each arm at a dose is a cell. Cells not measured yet go to the engine several plans a call, up to a token budget,
    and every call's cells are kept before the next begins.
    """
    cells = [_score_cell(session, arm, dose, targets) for arm, dose in arms]
    places = {cell.what["plan"]: k for k, cell in enumerate(cells)}  # arms of one plan are one cell
    found = {plan: session.cells.find(cells[k], session.engine_hash) for plan, k in places.items()}
    missing = [places[plan] for plan, frame in found.items() if frame is None]
    if missing:
        budget = tokens_per_call_of(session.backend, tokens_per_call)
        rows = [(item.prompt, item.targets) for item in targets]
        tokens = 0 if budget is None else row_tokens(session.engine, rows)
        with progress(len(missing), description, "arm") as bar:
            for batch in batch_plans(missing, tokens, budget):
                plans = [arms[k][0].plan.scaled(arms[k][1]) for k in batch]
                for k, frame in zip(batch, score_plans(session.engine, plans, targets), strict=True):
                    found[cells[k].what["plan"]] = session.cells.add(cells[k], session.engine_hash, frame)
                bar.update(len(batch))
    return [found[cell.what["plan"]] for cell in cells]  # pyright: ignore[reportReturnType]  nothing is missing now


def _score_cell(session: Session, arm: Arm, dose: float, targets: Targets) -> Cell:
    what = {"plan": arm.plan.scaled(dose).hash, "data": targets.hash}
    return Cell("scores", what, {"plan": session.inputs.add_plan(arm.plan), "scale": dose})


def _arms(session: Session, plan: Plan, controls: Controls, pairs: ContrastPairs | None) -> list[Arm]:
    """The control arms of a plan. Their plans are kept, so that a resumed run reads no activations for them."""
    what = {
        "plan": plan.hash,
        "controls": asdict(controls),
        "pairs": None if pairs is None else pairs.hash,
        "seed": session.seed,
    }

    def made() -> pd.DataFrame:
        arms = control_arms(session.lazy, plan, controls, pairs=pairs, seed=session.seed)
        rows = [(arm.family, arm.draw, session.inputs.add_plan(arm.plan)) for arm in arms]
        return pd.DataFrame(rows, columns=["family", "draw", "plan_hash"])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="About SteeringVector")
        frame = session.cells.get(Cell("arms", what), session.engine_hash, made)
    arms = [Arm(str(f), int(d), session.inputs.plan(str(h))) for f, d, h in frame.itertuples(index=False)]
    for arm in arms:
        check_wired(session, arm.plan)
    return arms


def _provenance(
    session: Session, plan: Plan, targets: Targets, pairs: ContrastPairs | None, neutral: Sequence[PromptLike]
) -> dict[str, Any]:
    return asdict(session.info) | {
        "engine": session.backend,
        "engine_hash": session.engine_hash,
        "targets_hash": targets.hash,
        "pairs_hash": None if pairs is None else pairs.hash,
        "neutral_hash": texts_hash(neutral),
        "from_pairs": labels_made(plan),
        "vectors": ", ".join(dict.fromkeys(v.name for edit in plan for v in edit.vectors if v.name)) or None,
        "versions": library_versions() | dict(session.fingerprint.versions),
    }


def _key(session: Session, effect: Effect, plan: Plan, controls: Controls) -> str:
    """Hash of everything that determines an effect."""
    what = {
        "plan": plan.hash,
        "doses": effect.doses,
        "controls": asdict(controls),
        "settings": asdict(effect.settings),
        **{name: effect.provenance[name] for name in ("targets_hash", "pairs_hash", "neutral_hash")},
    }
    return Cell("effect", what).key(session.engine_hash)


def _axis(plan: Plan) -> str:
    """`dose` if scaling the plan by d adds at dose d, else `scale`."""
    unit = [isinstance(e.operator, Add) and e.operator.unit == "dose" and e.operator.amount == 1 for e in plan]
    return "dose" if unit and all(unit) and all(edit.scale == 1 for edit in plan) else "scale"


def scores_again(session: Session, stored: StoredCell) -> pd.DataFrame:
    plan = stored_plan(session, stored)
    assert plan is not None
    if plan.hash != stored.cell.what["plan"]:
        raise RunError(f"its plan is {plan.hash}, it was measured under {stored.cell.what['plan']}")
    return score_plans(session.engine, [plan], session.inputs.targets(stored.cell.what["data"]))[0]
