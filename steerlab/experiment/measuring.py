"""What an experiment measures, cell by cell: finished ones come from the run directory, others from the engine."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import InputError, PlanError
from steerlab.core.targets import Targets
from steerlab.core.text import PromptLike
from steerlab.experiment.cells import Cell, Tally, join
from steerlab.experiment.controls import Arm, Controls, check_pairs, control_arms, labels_made
from steerlab.experiment.costs import perplexity_figures
from steerlab.experiment.effect import Effect, EffectSettings, outermost
from steerlab.experiment.inputs import texts_hash
from steerlab.experiment.metrics import Metric, find_metric, metric_identity
from steerlab.experiment.session import Session
from steerlab.experiment.sweep import (
    check_targets,
    in_calls,
    item_rows,
    row_tokens,
    score_plans,
    tokens_per_call_of,
)
from steerlab.scoring import text_nlls
from steerlab.steering.extraction.extract import library_versions
from steerlab.steering.operators import Add
from steerlab.steering.plan import Plan

COST_COLUMNS = ["nll", "perplexity", "ppl_ratio", "ppl_ratio_low", "ppl_ratio_high", "num_tokens", "num_texts"]


def resolved(session: Session, plan: Plan) -> Plan:
    """The plan, checked against the model, its doses tied to the model's norms.

    Raises:
        PlanError: for something that is not a plan, or layers that vLLM was not started with.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"This takes a Plan, got {type(plan).__name__}; wrap edits in Plan().")
    check_wired(session, plan)
    return plan.check(session.info).resolved(session.median_norm, session.info.weights_hash)


def check_wired(session: Session, plan: Plan) -> None:
    """Nothing, if the engine can edit every hook point of a plan; vLLM edits the layers it was started with.

    Raises:
        PlanError: otherwise; says which `layers` to start with.
    """
    if session.backend == "vllm" and session.loaded:
        from steerlab.engines.vllm.compiled_plan import wired_layer

        engine: Any = session.engine
        for point in plan.hook_points:
            wired_layer(point, engine.config)


def scores(
    session: Session,
    arms: Sequence[tuple[Arm, float]],
    targets: Targets,
    *,
    tokens_per_call: int | None = None,
    description: str = "scores",
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
        with tqdm(total=len(missing), desc=description, delay=2.0, leave=False, disable=None) as bar:
            for batch in in_calls(missing, tokens, budget):
                plans = [arms[k][0].plan.scaled(arms[k][1]) for k in batch]
                for k, frame in zip(batch, score_plans(session.engine, plans, targets), strict=True):
                    found[cells[k].what["plan"]] = session.cells.add(cells[k], session.engine_hash, frame)
                bar.update(len(batch))
    return [found[cell.what["plan"]] for cell in cells]  # pyright: ignore[reportReturnType]  nothing is missing now


def _score_cell(session: Session, arm: Arm, dose: float, targets: Targets) -> Cell:
    what = {"plan": arm.plan.scaled(dose).hash, "data": targets.hash}
    return Cell("scores", what, {"plan": session.inputs.add_plan(arm.plan), "scale": dose})


def token_nlls(session: Session, plan: Plan | None, dose: float, texts: Sequence[PromptLike]) -> list[np.ndarray]:
    """Negative log-probability of every token but the first, per text, under the plan at a dose; a cell."""
    steered = None if plan is None or dose == 0 else plan.scaled(dose)
    what = {"plan": None if steered is None else steered.hash, "data": session.inputs.add_data(list(texts))}
    about = {} if plan is None or steered is None else {"plan": session.inputs.add_plan(plan), "scale": dose}
    frame = session.cells.get(
        Cell("nlls", what, about),
        session.engine_hash,
        lambda: nll_frame(text_nlls(session.engine, texts, plan=steered)),
    )
    return [part.nll.to_numpy() for _, part in frame.groupby("text", sort=True)]


def nll_frame(nlls: Sequence[np.ndarray]) -> pd.DataFrame:
    """A row per token: `text`, `nll` (nats)."""
    index = np.repeat(np.arange(len(nlls)), [len(text) for text in nlls])
    return pd.DataFrame({"text": index, "nll": np.concatenate(list(nlls))})


def perplexities(session: Session, plan: Plan, texts: Sequence[PromptLike], doses: Sequence[float]) -> pd.DataFrame:
    """Perplexity of texts under the plan at each dose, as `steerlab.experiment.costs.perplexity_cost` gives it."""
    base = token_nlls(session, None, 0.0, texts)
    rows = []
    for dose in tqdm(doses, desc="cost", delay=2.0, leave=False, disable=None):
        nlls = base if dose == 0 else token_nlls(session, plan, dose, texts)
        rows.append((dose, *perplexity_figures(nlls, base, seed=session.seed)))
    return pd.DataFrame(rows, columns=["dose", *COST_COLUMNS])


def arms_of(session: Session, plan: Plan, controls: Controls, pairs: ContrastPairs | None) -> list[Arm]:
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

    frame = session.cells.get(Cell("arms", what), session.engine_hash, made)
    return [Arm(str(f), int(d), session.inputs.plan(str(h))) for f, d, h in frame.itertuples(index=False)]


def measure_effect(
    session: Session,
    plan: Plan,
    targets: Targets,
    doses: list[float],
    *,
    controls: Controls,
    metric: "str | Metric",
    pairs: ContrastPairs | None,
    max_ppl_ratio: float,
    neutral: Sequence[PromptLike],
    tokens_per_call: int | None,
) -> tuple[Effect, Plan]:
    """An effect and the plan as it ran; see `steerlab.experiment.Experiment.effect`.

    Args: as there; `doses` and `max_ppl_ratio` are checked.
    """
    metric_name, measure = find_metric(metric)
    check_targets(targets)
    if not isinstance(controls, Controls):
        raise InputError(f"controls is e.g. sl.Controls(random=20), got {controls!r:.60}.")
    check_pairs(controls, pairs)
    session.open()
    ready = resolved(session, plan)
    session.inputs.add_targets(targets)
    hashes = {
        "data_hash": targets.hash,
        "model_hash": session.info.weights_hash,
        "engine_hash": session.engine_hash,
    }

    def rows(work: list[tuple[Arm, float]], description: str) -> list[pd.DataFrame]:
        frames = scores(session, work, targets, tokens_per_call=tokens_per_call, description=description)
        return [item_rows(f, arm, dose, targets, measure, hashes) for f, (arm, dose) in zip(frames, work, strict=True)]

    if 0 not in doses:
        sys.stderr.write(
            "info: effect: dose 0 is not among the doses, so nothing will show the unsteered model; add 0 to see it\n"
        )
    with Tally(session.cells, "effect"):
        cost = perplexities(session, ready, neutral, doses)
        found = rows([(Arm("vector", 0, ready), dose) for dose in doses], "doses")
        allowed = [float(dose) for dose in cost[cost.ppl_ratio <= max_ppl_ratio].dose]
        if len(allowed) >= 2:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="About SteeringVector")
                arms = arms_of(session, ready, controls, pairs)
                for arm in arms:
                    check_wired(session, arm.plan)
                found += rows([(arm, d) for arm in arms for d in outermost(allowed) if d != 0], "controls")
    settings = EffectSettings(
        metric=metric_name,
        metric_identity=metric_identity(metric),
        axis=axis_of(plan),
        max_ppl_ratio=max_ppl_ratio,
        seed=session.seed,
    )
    provenance = asdict(session.info) | {
        "engine": session.backend,
        "engine_hash": session.engine_hash,
        "targets_hash": targets.hash,
        "pairs_hash": None if pairs is None else pairs.hash,
        "neutral_hash": texts_hash(neutral),
        "from_pairs": labels_made(plan),
        "vectors": ", ".join(dict.fromkeys(v.name for edit in plan for v in edit.vectors if v.name)) or None,
        "versions": library_versions() | dict(session.fingerprint.versions),
    }
    return Effect(join(found), cost, plan.hash, str(plan), settings, provenance), ready


def effect_key(session: Session, effect: Effect, plan: Plan, controls: Controls) -> str:
    """Hash of everything that determines an effect."""
    what = {
        "plan": plan.hash,
        "doses": effect.doses,
        "controls": asdict(controls),
        "settings": asdict(effect.settings),
        **{name: effect.provenance[name] for name in ("targets_hash", "pairs_hash", "neutral_hash")},
    }
    return Cell("effect", what).key(session.engine_hash)


def axis_of(plan: Plan) -> str:
    """`dose` if scaling the plan by d adds at dose d, else `scale`."""
    unit = [isinstance(e.operator, Add) and e.operator.unit == "dose" and e.operator.amount == 1 for e in plan]
    return "dose" if unit and all(unit) and all(edit.scale == 1 for edit in plan) else "scale"
