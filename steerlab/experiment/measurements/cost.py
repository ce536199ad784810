"""Cost: what steering does to ordinary text, and to the form of what is generated."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core._numbers import check_integer
from steerlab.core._progress import progress
from steerlab.core._text import PromptLike, as_prompts
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import exp_or_inf
from steerlab.experiment._blocks import Block, Section
from steerlab.experiment._blocks.findings import frame_sections
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import table_of
from steerlab.experiment._store.cells import Cell, StoredCell
from steerlab.experiment._store.plans import resolved, stored_plan
from steerlab.experiment._store.results import frame_kind
from steerlab.experiment._store.run import Run
from steerlab.experiment._store.session import Session
from steerlab.experiment.measurements._checks import check_doses
from steerlab.experiment.measurements._interval_rule import RULE_COLUMN, rule_of, with_rule
from steerlab.experiment.measurements._measurement import Measurement
from steerlab.experiment.measurements.generations import completions, generate_paired
from steerlab.experiment.measurements.texts import neutral_texts, text_statistics
from steerlab.measures.intervals import cluster_t_mean
from steerlab.scoring import text_nlls
from steerlab.steering.plan import Plan

COLUMNS = ["nll", "perplexity", "ppl_ratio", "ppl_ratio_low", "ppl_ratio_high", "num_tokens", "num_texts"]
_PERPLEXITY = ["dose", *COLUMNS]


def perplexity_cost(
    engine: Engine,
    plan: Plan,
    texts: Sequence[PromptLike],
    doses: Sequence[float],
    *,
    level: float = 0.95,
) -> pd.DataFrame:
    """Perplexity of texts under the plan at each dose, and its ratio to the unsteered model's.

    Ratios weight every token alike: exp of the mean difference of negative log-probability per token. Their intervals
    are Student's t over texts, each with its tokens in both arms.

    Args:
        engine: the engine.
        plan: the plan at scale 1.
        texts: texts to score, of at least two tokens each.
        doses: factors the plan is scaled by.
        level: coverage of the intervals.

    Returns:
        A row per dose: `dose`, `nll` (mean per token, nats), `perplexity`, `ppl_ratio`, `ppl_ratio_low` and
        `ppl_ratio_high` (NaN for a single text), `num_tokens`, `num_texts`, and `interval`, the rule of the intervals.

    Raises:
        PromptError: for a text of fewer than two tokens.
        PlanError: for positions that the windows of a long text cannot honour.
    """

    def nlls(dose: float) -> list[np.ndarray]:
        return text_nlls(engine, texts, plan=None if dose == 0 else plan.scaled(dose))

    return _table(nlls, doses, level=level)


def _table(
    nlls_at: Callable[[float], list[np.ndarray]],
    doses: Sequence[float],
    *,
    level: float = 0.95,
) -> pd.DataFrame:
    """The table of `perplexity_cost`, from a function that gives the nats per token of every text at a dose."""
    base, rows = nlls_at(0.0), []
    with progress(len(doses), "cost", "dose") as bar:
        for dose in doses:
            nlls = base if dose == 0 else nlls_at(dose)
            rows.append((dose, *perplexity_figures(nlls, base, level=level)))
            bar.update()
    return with_rule(pd.DataFrame(rows, columns=["dose", *COLUMNS]))


def perplexity_figures(
    nlls: Sequence[np.ndarray],
    base: Sequence[np.ndarray],
    *,
    level: float = 0.95,
) -> tuple[float, float, float, float, float, int, int]:
    """Figures of one arm against the unsteered one, from the negative log-probabilities of the same tokens.

    Args:
        nlls: per text, nats of each token in the arm.
        base: the same without steering.
        level: coverage of the interval.

    Returns:
        Mean nll, perplexity, ratio, low and high end of the ratio's interval, number of tokens, number of texts.

    Raises:
        InputError: if the two do not hold the same number of tokens per text.
    """
    change = _changes(nlls, base)
    lengths = [len(text) for text in base]
    texts = np.repeat(np.arange(len(lengths)), lengths).astype(str).tolist()
    interval = cluster_t_mean(change, texts, level=level)
    nll = float(np.concatenate(list(nlls)).mean())
    # exp keeps order, so the ends of a mean's interval go through it
    ratio, low, high = (exp_or_inf(value) for value in (float(change.mean()), interval.low, interval.high))
    return nll, exp_or_inf(nll), ratio, low, high, len(change), len(lengths)


def perplexity_ratio(nlls: Sequence[np.ndarray], base: Sequence[np.ndarray]) -> float:
    """Perplexity of the same tokens in one arm over that in the other; every token counts alike."""
    return exp_or_inf(float(_changes(nlls, base).mean()))


def _changes(nlls: Sequence[np.ndarray], base: Sequence[np.ndarray]) -> np.ndarray:
    lengths = [len(text) for text in base]
    if [len(text) for text in nlls] != lengths:
        raise InputError(f"Both arms must score the same tokens; got {[len(t) for t in nlls]} against {lengths}.")
    return np.concatenate(list(nlls)) - np.concatenate(list(base))


def generation_cost(
    engine: Engine,
    plan: Plan,
    prompts: Sequence[PromptLike],
    doses: Sequence[float],
    *,
    policy: SamplingPolicy,
    max_new_tokens: int = 40,
    n: int = 1,
    seed: int = 0,
    chat: bool = False,
) -> pd.DataFrame:
    """Repetition, diversity and length of what is generated at each dose, every dose with the same draws.

    Args:
        engine: the engine.
        plan: the plan at scale 1.
        prompts: prompts to continue.
        doses: factors the plan is scaled by.
        policy: the sampling policy.
        max_new_tokens: tokens at most.
        n: samples per prompt.
        seed: of the draws.
        chat: take strings as user turns of a chat.

    Returns:
        A row per dose, see `steerlab.experiment.measurements.texts.text_statistics`.
    """
    rows = generate_paired(
        engine, plan, prompts, doses=doses, policy=policy, max_new_tokens=max_new_tokens, n=n, seed=seed, chat=chat
    )
    return text_statistics(rows)


def measure_cost(
    run: Run,
    plan: Plan,
    texts: Sequence[PromptLike] | None,
    *,
    doses: Sequence[float],
    prompts: Sequence[PromptLike] | None,
    policy: SamplingPolicy,
    max_new_tokens: int,
    n: int,
) -> pd.DataFrame:
    """See `steerlab.experiment.Experiment.cost`."""
    run_doses = check_doses(doses, at_least=1)
    max_new_tokens, n = check_integer(max_new_tokens, "max_new_tokens", least=0), check_integer(n, "n", least=1)
    given = None if prompts is None else as_prompts(prompts)
    run.session.open()
    ready, neutral = resolved(run.session, plan), neutral_texts(texts)
    looked = [None if texts is None else neutral, given]
    with run.measuring("cost", lambda: (looked, [plan.hash, run_doses, str(policy), max_new_tokens, n])):
        frame = perplexities(run.session, ready, neutral, run_doses).assign(plan_hash=plan.hash)
        if given is not None:
            options = {"policy": policy, "max_new_tokens": max_new_tokens, "n": n, "stop": [], "chat": False}
            made = completions(run.session, plan, given, run_doses, options)
            frame = frame.merge(text_statistics(made), on="dose")
    return run.keep("cost", [ready.hash, run_doses, neutral, given, str(policy), max_new_tokens, n], frame)


def perplexities(session: Session, plan: Plan, texts: Sequence[PromptLike], doses: Sequence[float]) -> pd.DataFrame:
    """As `perplexity_cost`; the texts at a dose are a cell."""
    return _table(lambda dose: _token_nlls(session, plan, dose, texts), doses)


def _token_nlls(session: Session, plan: Plan, dose: float, texts: Sequence[PromptLike]) -> list[np.ndarray]:
    """Negative log-probability of every token but the first, per text, under the plan at a dose; a cell."""
    steered = None if dose == 0 else plan.scaled(dose)
    what = {"plan": None if steered is None else steered.hash, "data": session.inputs.add_data(list(texts))}
    about = {} if steered is None else {"plan": session.inputs.add_plan(plan), "scale": dose}
    frame = session.cells.get(
        Cell("nlls", what, about),
        session.engine_hash,
        lambda: _nll_frame(text_nlls(session.engine, texts, plan=steered)),
    )
    return [part.nll.to_numpy() for _, part in frame.groupby("text", sort=True)]


def _nll_frame(nlls: Sequence[np.ndarray]) -> pd.DataFrame:
    """A row per token: `text`, `nll` (nats)."""
    index = np.repeat(np.arange(len(nlls)), [len(text) for text in nlls])
    return pd.DataFrame({"text": index, "nll": np.concatenate(list(nlls))})


def _nlls_again(session: Session, stored: StoredCell) -> pd.DataFrame:
    texts = session.inputs.data(stored.cell.what["data"])
    return _nll_frame(text_nlls(session.engine, texts, plan=stored_plan(session, stored)))


def cost_blocks(frame: Any, place: str) -> list[Block]:
    """Perplexity of further text, and the form of completions if it is there; `frame` as `Experiment.cost` gives it."""
    other = [column for column in frame.columns if column not in (*_PERPLEXITY, "plan_hash", RULE_COLUMN)]
    text = frame[[column for column in _PERPLEXITY if column in frame.columns]]
    tables: list[Block] = [
        table_of(text, f"Perplexity of text per dose, with intervals by {rule_of(frame)} over texts", place=place)
    ]
    if other:
        tables.append(table_of(frame[["dose", *other]], "Form of what was generated, per dose", place=place))
    return tables


def _sections(m: Material) -> list[Section]:
    return frame_sections("Cost on further text", m.of("costs"), cost_blocks, "cost")


COST = Measurement(frame_kind("cost", "costs"), _sections, {"nlls": _nlls_again})
