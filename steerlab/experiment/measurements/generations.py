"""Generations paired by seed: the same prompts with the same draws at every dose, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from steerlab.core._numbers import check_flag, check_integer
from steerlab.core._stopping import stop_strings
from steerlab.core._text import PromptLike, as_prompts
from steerlab.core.engine import Engine
from steerlab.core.policy import SamplingPolicy
from steerlab.experiment._blocks import Block, Completions, Paragraph, Section
from steerlab.experiment._blocks.findings import conditions, frame_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import count
from steerlab.experiment._store.cells import Cell, StoredCell, join
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.results import frame_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import Session
from steerlab.experiment._wording import number
from steerlab.experiment.measurements._checks import check_doses
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.judgements import rated
from steerlab.experiment.measurements.pairing import KEY
from steerlab.experiment.measurements.texts import Judge, judged
from steerlab.scoring.judging import RubricJudge
from steerlab.steering.plan import Plan

MAX_PROMPTS = 20


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
    SamplingPolicy.check(policy)
    run_doses, found = check_doses(doses, at_least=1), as_prompts(prompts)
    max_new_tokens, n = check_integer(max_new_tokens, "max_new_tokens", least=0), check_integer(n, "n", least=1)
    run.session.open()
    strings = list(stop_strings(stop))
    as_chat = check_flag(chat, "chat")
    options = {"policy": policy, "max_new_tokens": max_new_tokens, "n": n, "stop": strings, "chat": as_chat}
    stated = options | {"policy": str(policy)}
    with run.measuring("generate", lambda: ([found], [plan.hash, run_doses, stated])):
        frame = completions(run.session, plan, found, run_doses, options)
        if isinstance(judge, RubricJudge):
            frame = rated(run, frame, judge)
    frame = frame if judge is None or isinstance(judge, RubricJudge) else judged(frame, judge)
    judged_by = judge.card.hash if isinstance(judge, RubricJudge) else None if judge is None else sorted(frame.columns)
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
