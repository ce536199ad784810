"""Cost: what steering does to ordinary text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from steerlab.core.engine import Engine
from steerlab.core.errors import PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.text import PromptLike
from steerlab.measures.entropy import rb_entropy
from steerlab.scoring import text_nlls, text_windows
from steerlab.steering.plan import Plan


def perplexity_cost(engine: Engine, plan: Plan, texts: Sequence[PromptLike], doses: Sequence[float]) -> pd.DataFrame:
    """Perplexity of texts under the plan at each dose, and its ratio to the unsteered model's.

    Returns:
        A row per dose: `dose`, `nll` (mean per token, nats), `perplexity`, `ppl_ratio`, `num_tokens`.
    """
    base = _mean_nll(engine, None, texts)
    rows = []
    for dose in tqdm(doses, desc="cost", delay=2.0, leave=False, disable=None):
        nll, count = base if dose == 0 else _mean_nll(engine, plan.scaled(dose), texts)
        rows.append((dose, nll, float(np.exp(nll)), float(np.exp(nll - base[0])), count))
    return pd.DataFrame(rows, columns=["dose", "nll", "perplexity", "ppl_ratio", "num_tokens"])


def _mean_nll(engine: Engine, plan: Plan | None, texts: Sequence[PromptLike]) -> tuple[float, int]:
    nlls = np.concatenate(text_nlls(engine, texts, plan=plan))
    return float(nlls.mean()), len(nlls)


def entropy_change(engine: Any, plan: Plan, texts: Sequence[PromptLike], policy: SamplingPolicy) -> pd.DataFrame:
    """Entropy of the policy's next-token distribution on the same texts, in both arms, teacher-forced.

    Returns:
        A row per text and token but the first: `text`, `position`, `token_id`, `base` and `steered` (nats).

    Raises:
        PolicyError: for a policy with a repetition penalty, whose distribution depends on all tokens before.
    """
    if policy.repetition_penalty != 1:
        raise PolicyError("Entropy on given text does not cover repetition_penalty; use a policy without it.")
    windows = text_windows(engine, texts)
    measures = {"entropy": lambda logits, tokens: rb_entropy(logits, policy)}
    prompts, targets = [w.ids[:1] for w in windows], [[w.ids[1:]] for w in windows]
    base = engine.measure(prompts, targets, measures)
    steered = engine.measure(prompts, targets, measures, plan=plan)
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "text": window.text,
                    "position": np.arange(window.first_scored, window.first_scored + window.n_scored),
                    "token_id": window.ids[-window.n_scored :],
                    "base": before["entropy"][-window.n_scored :],
                    "steered": after["entropy"][-window.n_scored :],
                }
            )
            for window, before, after in zip(windows, base, steered, strict=True)
        ],
        ignore_index=True,
    )
