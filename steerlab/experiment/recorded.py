"""Measurements other than effects, cell by cell; see `steerlab.experiment.measuring`."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.policy import SamplingPolicy
from steerlab.core.spelling import token_text
from steerlab.core.targets import Targets
from steerlab.core.text import PromptLike
from steerlab.experiment.cells import Cell, join
from steerlab.experiment.entropies import entropy_change
from steerlab.experiment.generations import KEY, generate_paired
from steerlab.experiment.measuring import resolved
from steerlab.experiment.session import Session, plain_option
from steerlab.steering.extraction.extract import extract
from steerlab.steering.extraction.pair_activations import Origin, Reading
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import Where, last_prompt
from steerlab.steering.vectors import VectorSet


def entropies(session: Session, plan: Plan, texts: Sequence[PromptLike], policy: SamplingPolicy) -> pd.DataFrame:
    """Entropies and divergences of both arms on the same texts; one cell."""
    ready = resolved(session, plan)
    what = {
        "plan": session.inputs.add_plan(ready),
        "data": session.inputs.add_data(list(texts)),
        "policy": asdict(policy),
    }
    return session.cells.get(
        Cell("entropies", what, {"plan": ready.hash}),
        session.engine_hash,
        lambda: entropy_rows(session, ready, texts, policy),
    )


def entropy_rows(
    session: Session, plan: Plan | None, texts: Sequence[PromptLike], policy: SamplingPolicy
) -> pd.DataFrame:
    """Entropies and divergences of both arms, with each token as text in the column `token`."""
    frame = entropy_change(session.engine, plan, texts, policy)
    tokenizer = session.engine.tokenizer
    frame.insert(3, "token", [token_text(tokenizer, int(token)) for token in frame.token_id])
    return frame


def generations(
    session: Session, plan: Plan, prompts: Sequence[PromptLike], doses: Sequence[float], options: Mapping[str, Any]
) -> pd.DataFrame:
    """Completions of the same prompts with the same draws at every dose; a cell per dose.

    Args:
        session: the session.
        plan: the plan at scale 1.
        prompts: prompts to continue.
        doses: factors the plan is scaled by.
        options: `policy` and further arguments of `generate_paired`, without the seed.
    """
    ready, policy = resolved(session, plan), options["policy"]
    data = session.inputs.add_data(list(prompts))
    frames = []
    for dose in doses:
        steered = None if dose == 0 else ready.scaled(dose).hash
        what = {"plan": steered, "data": data, "seed": session.seed, **options, "policy": asdict(policy)}
        about = {} if steered is None else {"plan": session.inputs.add_plan(ready), "scale": dose}
        frame = session.cells.get(
            Cell("generations", what, about),
            session.engine_hash,
            lambda dose=dose: generation_rows(session, ready, prompts, dose, options),
        )
        frames.append(frame.assign(dose=float(dose), plan_hash=plan.hash))  # dose 0 is shared by all plans
    return join(frames).sort_values([*KEY, "dose"]).reset_index(drop=True)


def generation_rows(
    session: Session, plan: Plan, prompts: Sequence[PromptLike], dose: float, options: Mapping[str, Any]
) -> pd.DataFrame:
    """Completions at one dose."""
    made = generate_paired(session.engine, plan, prompts, doses=[dose], seed=session.seed, **options)
    return made.drop(columns="plan_hash")


def vector_cell(
    pairs: ContrastPairs | Targets,
    method: str,
    site: str,
    layers: Any,
    read: Where | None,
    chat: bool,
    options: Mapping[str, Any],
) -> Cell:
    """What determines a set of extracted vectors."""
    given = {
        name: option.to_json() if isinstance(option, Where) else plain_option(option)
        for name, option in options.items()
    }
    what = {
        "data": pairs.hash,
        "method": method,
        "site": site,
        "layers": plain_option(layers),
        "read": None if read is None else read.to_json(),
        "chat": chat,
        "options": given,
    }
    return Cell("vectors", what)


def extracted(
    session: Session,
    pairs: ContrastPairs | Targets,
    method: str,
    site: str,
    layers: Any,
    read: Where | None,
    chat: bool,
    options: Mapping[str, Any],
) -> VectorSet:
    """Vectors extracted with the session's engine."""
    return extract(session.engine, pairs, method, site, layers, read, chat=chat, **options)


def with_origin(
    session: Session, vectors: VectorSet, read: Where | None, chat: bool, options: Mapping[str, Any]
) -> VectorSet:
    """Vectors from contrast pairs, read back from disk, that remember their making as those just extracted do."""
    sites = {vector.site for vector in vectors.values()}
    where = last_prompt() if read is None else read
    reading = Reading(sites.pop(), tuple(vectors), where, str(options.get("pool", "mean")), chat)
    return VectorSet(vectors.by_layer, Origin(weakref.ref(session.lazy), reading, int(options["seed"])))
