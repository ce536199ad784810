"""Studies of several arms, on the cells of an experiment: selection, confirmation, interaction, transfer, parity."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.targets import Targets
from steerlab.core.text import PromptLike
from steerlab.experiment.cell_engine import CellEngine
from steerlab.experiment.cells import Cell, join
from steerlab.experiment.fingerprint import Fingerprint, engine_versions
from steerlab.experiment.item_values import item_values
from steerlab.experiment.metrics import Metric, find_metric, metric_identity
from steerlab.experiment.selection import (
    TRY_COLUMNS,
    Baseline,
    Selection,
    Try,
    choose,
    measure_try,
)
from steerlab.experiment.session import BACKENDS, Session
from steerlab.steering.plan import Plan


def select(
    session: Session,
    tries: Sequence[Try],
    on: Targets,
    *,
    bounds: Mapping[str, float],
    metric: "str | Metric",
    texts: Sequence[PromptLike],
    policy: SamplingPolicy,
) -> Selection:
    """As `steerlab.experiment.selection.select`, of listed tries and within checked bounds; every try is a cell."""
    _, measure = find_metric(metric)
    engine: Any = CellEngine(session)
    item_values(engine, [None, *(one.plan for one in tries)], on, measure)  # all at once, where the engine gains by it

    @functools.cache
    def baseline() -> Baseline:  # needs the tokenizer, hence the model, so only if a try is missing
        return Baseline.of(engine, on, measure, texts if "ppl_ratio" in bounds else ())

    def row(one: Try) -> pd.DataFrame:
        found = measure_try(engine, one, on, measure, baseline(), bounds=bounds, texts=texts, policy=policy)
        return pd.DataFrame([found], columns=TRY_COLUMNS)

    same = {
        "on": on.hash,
        "metric": metric_identity(metric),
        "texts": session.inputs.add_data(list(texts)),
        "constraints": sorted(bounds),
        "policy": asdict(policy),
    }
    frames = [session.cells.get(_try_cell(one, same), session.engine_hash, lambda one=one: row(one)) for one in tries]
    return choose(tries, join(frames), on, metric=metric, subject_to=bounds)


def _try_cell(one: Try, same: Mapping[str, Any]) -> Cell:
    return Cell("tries", {"plan": one.plan.hash, "vector": one.vector.hash, "name": one.name, "dose": one.dose, **same})


def elsewhere(session: Session, engine: Engine | None) -> Any:
    """The session's engine, or another one, with scores kept as cells."""
    return CellEngine(session, engine)


def other_engine_hash(session: Session, engine: Any) -> str:
    """Identity of an engine to compare with, without starting it if it is only named."""
    if engine is None:
        return session.engine_hash
    if isinstance(engine, str):
        return f"{engine} {sorted(engine_versions(engine).items())}"
    return Fingerprint.of(engine, {}).hash


def start_other(session: Session, against: str, plan: Plan, options: Mapping[str, Any]) -> Engine:
    """Another backend's engine with the same model, started for one comparison.

    Raises:
        InputError: for an unknown backend, or a model that is only held in memory.
    """
    if against not in BACKENDS:
        raise InputError(f"against is an engine or one of {', '.join(BACKENDS)}; got {against!r}.")
    if not isinstance(session.model, str | Path):
        raise InputError(f"The model is held in memory, so {against} cannot load it; pass against= an engine.")
    options = {"dtype": session.info.dtype, **options}
    if against == "lens":
        from steerlab.engines.lens import load

        return load(session.model, **options)
    from steerlab.engines.vllm import VLLMEngine

    return VLLMEngine(session.model, **{"layers": wired_by(plan), **options})


def wired_by(plan: Plan) -> list[int]:
    """The layers that vLLM must wire for a plan: the stream before a layer is the one after the layer below."""
    return sorted({point.layer - (point.site == "resid_pre") for point in plan.hook_points})
