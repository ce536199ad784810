"""Generations paired by seed: the same prompts with the same draws at every dose, side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.engine import Engine
from steerlab.core.errors import DataError
from steerlab.core.numbers import check_flag, check_integer
from steerlab.core.policy import SamplingPolicy
from steerlab.core.stopping import stop_strings
from steerlab.core.text import PromptLike, as_prompts
from steerlab.experiment.blocks import Block, Completions, Paragraph, Section
from steerlab.experiment.blocks.findings import conditions, frame_sections
from steerlab.experiment.blocks.material import Material
from steerlab.experiment.blocks.tables import count
from steerlab.experiment.measurements.checks import check_doses
from steerlab.experiment.measurements.measurement import Measurement
from steerlab.experiment.measurements.texts import Judge, judged
from steerlab.experiment.store.cells import Cell, StoredCell, join
from steerlab.experiment.store.plans import resolved
from steerlab.experiment.store.results import frame_kind
from steerlab.experiment.store.run import Run
from steerlab.experiment.store.session import Session
from steerlab.experiment.wording import number
from steerlab.measures.intervals import cluster_bootstrap_mean
from steerlab.steering.plan import Plan

MAX_PROMPTS = 20
KEY = ["prompt_index", "sample_index"]


def generate_paired(
    engine: Engine,
    plan: Plan,
    prompts: Sequence[PromptLike] | PromptLike,
    *,
    doses: Sequence[float] = (0.0, 1.0),
    policy: SamplingPolicy,
    max_new_tokens: int = 40,
    n: int = 1,
    seed: int = 0,
    stop: Sequence[str] | str = (),
    chat: bool = False,
) -> pd.DataFrame:
    """Completions of each prompt at each dose; draws are keyed by seed, prompt and sample, so they are the same.

    Args:
        engine: the engine.
        plan: the plan at scale 1; dose 0 is the unsteered model.
        prompts: prompts to continue.
        doses: factors the plan is scaled by.
        policy: the sampling policy.
        max_new_tokens: tokens at most.
        n: samples per prompt.
        seed: of the draws.
        stop: strings that end a completion.
        chat: take strings as user turns of a chat.

    Returns:
        A row per prompt, sample and dose: `prompt_index`, `sample_index`, `prompt`, `dose`, `text`, `num_tokens`,
        `finish_reason`, `log_prob`, `log_q`, `token_ids`, `edited_tokens` (of the receipts), `plan_hash`, `policy`.

    Raises:
        InputError: without doses, or if one stands twice.
    """
    found = as_prompts(prompts)
    frames = []
    for dose in check_doses(doses, at_least=1):
        made = engine.generate(
            found,
            plan=None if dose == 0 else plan.scaled(dose),
            policy=policy,
            max_new_tokens=max_new_tokens,
            n=n,
            seed=seed,
            stop=stop,
            chat=chat,
        )
        frame = made.to_frame()
        frame.insert(2, "prompt", [str(found[i]) for i in frame.prompt_index])
        frame.insert(3, "dose", dose)
        frame["token_ids"] = pd.Series([list(completion.token_ids) for completion in made], dtype=object)
        frame["edited_tokens"] = [receipt.edited for receipt in made.receipts]
        frames.append(frame)
    return (
        pd.concat(frames)
        .assign(plan_hash=plan.hash, policy=str(policy))
        .sort_values([*KEY, "dose"])
        .reset_index(drop=True)
    )


def side_by_side(rows: pd.DataFrame, column: str = "text") -> pd.DataFrame:
    """One column per dose, one row per prompt and sample.

    Args:
        rows: as `generate_paired` makes them.
        column: what to show, e.g. `text` or a judge's opinion.

    Returns:
        `prompt_index`, `sample_index`, `prompt`, and one column per dose, named by it.

    Raises:
        DataError: if a completion is missing at a dose, or there twice.
    """
    wide = _wide(rows, column)
    prompts = rows.drop_duplicates(KEY).set_index(KEY).prompt
    named = wide.rename(columns={dose: f"{dose:g}" for dose in wide.columns})
    named.columns.name = None
    named.insert(0, "prompt", prompts.reindex(named.index))
    return named.reset_index()


@dataclass(frozen=True)
class PairedDifference:
    """How a figure of generated texts differs between two doses, over the same prompts and draws.

    Attributes:
        column: the figure.
        dose: the dose compared.
        base_dose: what it is compared with.
        base_mean: mean at the base dose, over the pairs.
        mean: mean at the dose, over the pairs.
        difference: mean − base_mean.
        low: lower end of its bootstrap interval, prompts resampled with all their samples; NaN for one prompt.
        high: upper end.
        num_pairs: pairs of completions that have the figure at both doses.
        num_missing: pairs left out because one side has none (NaN).
        num_prompts: prompts of those pairs.
    """

    column: str
    dose: float
    base_dose: float
    base_mean: float
    mean: float
    difference: float
    low: float
    high: float
    num_pairs: int
    num_missing: int
    num_prompts: int


def paired_differences(
    rows: pd.DataFrame,
    column: str,
    *,
    base_dose: float = 0.0,
    level: float = 0.95,
    n_resamples: int = 4000,
    seed: int = 0,
) -> list[PairedDifference]:
    """The mean difference of a figure from its value at the base dose, at each other dose.

    Args:
        rows: a row per prompt, sample and dose.
        column: a numeric column, e.g. `num_tokens`, `repetition` or `judge`.
        base_dose: the dose to compare with.
        level: coverage of the intervals.
        n_resamples: bootstrap draws.
        seed: of the draws.

    Returns:
        One entry per other dose, in order of dose; `pd.DataFrame(entries)` is a table.

    Raises:
        DataError: if a completion is missing at a dose, or the base dose was not run.
    """
    wide = _wide(rows, column)
    if base_dose not in wide.columns:
        raise DataError(f"There are no completions at dose {base_dose:g}; doses here: {wide.columns.tolist()}.")
    options = {"level": level, "n_resamples": n_resamples, "seed": seed}
    others = [dose for dose in wide.columns if dose != base_dose]
    return [_difference(wide, column, float(dose), base_dose, options) for dose in others]


def _difference(wide: Any, column: str, dose: float, base_dose: float, options: dict[str, Any]) -> PairedDifference:
    table = wide[[base_dose, dose]].astype(float)
    pairs = table.dropna()
    change = (pairs[dose] - pairs[base_dose]).to_numpy()
    prompts = pairs.index.get_level_values("prompt_index").astype(str).tolist()
    ends = cluster_bootstrap_mean(change, prompts, **options)
    return PairedDifference(
        column=column,
        dose=dose,
        base_dose=base_dose,
        base_mean=_mean(pairs[base_dose]),
        mean=_mean(pairs[dose]),
        difference=_mean(change),
        low=ends.low,
        high=ends.high,
        num_pairs=len(pairs),
        num_missing=len(table) - len(pairs),
        num_prompts=len(set(prompts)),
    )


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _wide(rows: pd.DataFrame, column: str) -> Any:
    """Prompts and samples down, doses across; every cell filled exactly once."""
    missing = [name for name in (*KEY, "dose", column) if name not in rows.columns]
    if missing:
        raise DataError(f"The frame of completions lacks {missing}; it has {list(rows.columns)}.")
    counts = rows.groupby(KEY).dose.agg(["size", "nunique"])
    n_doses = rows.dose.nunique()
    if not ((counts["size"] == n_doses) & (counts["nunique"] == n_doses)).all():
        raise DataError("Each prompt and sample needs exactly one completion at each dose, so that they can be paired.")
    return rows.set_index([*KEY, "dose"])[column].unstack("dose")


def measure_generations(
    run: Run,
    plan: Plan,
    prompts: Sequence[PromptLike] | PromptLike,
    *,
    policy: SamplingPolicy,
    max_new_tokens: int,
    n: int,
    doses: Sequence[float],
    stop: Sequence[str] | str,
    chat: bool,
    judge: Judge | None,
) -> pd.DataFrame:
    """See `steerlab.experiment.Experiment.generate`."""
    run_doses, found = check_doses(doses, at_least=1), as_prompts(prompts)
    max_new_tokens, n = check_integer(max_new_tokens, "max_new_tokens", least=0), check_integer(n, "n", least=1)
    run.session.open()
    strings = list(stop_strings(stop))
    as_chat = check_flag(chat, "chat")
    options = {"policy": policy, "max_new_tokens": max_new_tokens, "n": n, "stop": strings, "chat": as_chat}
    stated = options | {"policy": str(policy)}
    with run.measuring("generate", lambda: ([found], [plan.hash, run_doses, stated])):
        frame = completions(run.session, plan, found, run_doses, options)
    frame = frame if judge is None else judged(frame, judge)
    judged_by = None if judge is None else sorted(set(frame.columns))
    return run.keep("generations", [plan.hash, found, run_doses, stated, judged_by], frame)


def completions(
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
            lambda dose=dose: _completions_at(session, ready, prompts, dose, options),
        )
        frames.append(frame.assign(dose=float(dose), plan_hash=plan.hash))  # dose 0 is shared by all plans
    return join(frames).sort_values([*KEY, "dose"]).reset_index(drop=True)


def _completions_at(
    session: Session, plan: Plan, prompts: Sequence[PromptLike], dose: float, options: Mapping[str, Any]
) -> pd.DataFrame:
    """Completions at one dose."""
    made = generate_paired(session.engine, plan, prompts, doses=[dose], seed=session.seed, **options)
    return made.drop(columns="plan_hash")


def _generations_again(session: Session, stored: StoredCell) -> pd.DataFrame:
    what, about = stored.cell.what, stored.cell.about
    options = {name: value for name, value in what.items() if name not in ("plan", "data", "seed")}
    options["policy"] = SamplingPolicy(**what["policy"])
    plan = session.inputs.stored_plan(about["plan"]) if "plan" in about else Plan()
    return _completions_at(session, plan, session.inputs.data(what["data"]), about.get("scale", 0.0), options)


def generation_blocks(frame: pd.DataFrame, place: str) -> list[Block]:
    """Completions side by side; `frame` as `Experiment.generate` gives it."""
    groups = list(frame.groupby(["prompt_index", "sample_index"], sort=False))
    doses = ", ".join(number(dose) for dose in sorted(frame.dose.unique()))
    intro = f"Each prompt's samples use the same random draws at every dose ({doses})."
    if len(groups) > MAX_PROMPTS:
        intro += f" {MAX_PROMPTS} of {count(len(groups))} samples; all in {place}."
    shown: list[Block] = [
        Completions(
            str(part.prompt.iloc[0]),
            [(number(dose, "+g") if dose else "0", str(text)) for dose, text in zip(part.dose, part.text, strict=True)],
        )
        for _, part in groups[:MAX_PROMPTS]
    ]
    return [Paragraph(intro, quiet=True), *conditions(frame), *shown]


def _sections(m: Material) -> list[Section]:
    return frame_sections("Generations side by side", m.of("generations"), generation_blocks, "generations")


GENERATIONS = Measurement(frame_kind("generations", "generations"), _sections, {"generations": _generations_again})
