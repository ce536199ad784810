"""Cost: what steering does to ordinary text, and to the form of what is generated."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import exp_or_inf
from steerlab.core.text import PromptLike
from steerlab.experiment.generations import generate_paired
from steerlab.experiment.texts import text_statistics
from steerlab.measures.intervals import cluster_bootstrap_mean
from steerlab.scoring import text_nlls
from steerlab.steering.plan import Plan


def perplexity_cost(
    engine: Engine,
    plan: Plan,
    texts: Sequence[PromptLike],
    doses: Sequence[float],
    *,
    level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Perplexity of texts under the plan at each dose, and its ratio to the unsteered model's.

    Ratios weight every token alike: exp of the mean difference of negative log-probability per token. Their intervals
    resample whole texts, each with its tokens in both arms.

    Args:
        engine: the engine.
        plan: the plan at scale 1.
        texts: texts to score, of at least two tokens each.
        doses: factors the plan is scaled by.
        level: coverage of the intervals.
        n_resamples: bootstrap draws.
        seed: of the draws.

    Returns:
        A row per dose: `dose`, `nll` (mean per token, nats), `perplexity`, `ppl_ratio`, `ppl_ratio_low` and
        `ppl_ratio_high` (NaN for a single text), `num_tokens`, `num_texts`.

    Raises:
        PromptError: for a text of fewer than two tokens.
        PlanError: for positions that the windows of a long text cannot honour.
    """
    base = text_nlls(engine, texts)
    rows = []
    for dose in tqdm(doses, desc="cost", delay=2.0, leave=False, disable=None):
        nlls = base if dose == 0 else text_nlls(engine, texts, plan=plan.scaled(dose))
        rows.append((dose, *perplexity_figures(nlls, base, level=level, n_resamples=n_resamples, seed=seed)))
    names = ["nll", "perplexity", "ppl_ratio", "ppl_ratio_low", "ppl_ratio_high", "num_tokens", "num_texts"]
    return pd.DataFrame(rows, columns=["dose", *names])


def perplexity_figures(
    nlls: Sequence[np.ndarray],
    base: Sequence[np.ndarray],
    *,
    level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float, float, float, int, int]:
    """Figures of one arm against the unsteered one, from the negative log-probabilities of the same tokens.

    Args:
        nlls: per text, nats of each token in the arm.
        base: the same without steering.
        level: coverage of the interval.
        n_resamples: bootstrap draws.
        seed: of the draws.

    Returns:
        Mean nll, perplexity, ratio, low and high end of the ratio's interval, number of tokens, number of texts.

    Raises:
        InputError: if the two do not hold the same number of tokens per text.
    """
    change = _changes(nlls, base)
    lengths = [len(text) for text in base]
    texts = np.repeat(np.arange(len(lengths)), lengths).astype(str).tolist()
    interval = cluster_bootstrap_mean(change, texts, level=level, n_resamples=n_resamples, seed=seed)
    nll = float(np.concatenate(list(nlls)).mean())
    # exp keeps order, so the quantiles of a mean go through it
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
        A row per dose, see `steerlab.experiment.texts.text_statistics`.
    """
    rows = generate_paired(
        engine, plan, prompts, doses=doses, policy=policy, max_new_tokens=max_new_tokens, n=n, seed=seed, chat=chat
    )
    return text_statistics(rows)
