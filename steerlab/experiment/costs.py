"""Cost: what steering does to ordinary text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from steerlab.core.engine import Engine
from steerlab.core.policy import SamplingPolicy
from steerlab.core.text import PromptLike, encode_prompt
from steerlab.measures.entropy import rb_entropy
from steerlab.scoring import text_nlls
from steerlab.steering.plan import Plan


def windows_that_fit(engine: Engine, texts: Sequence[PromptLike]) -> list[list[int]]:
    """The texts' token ids, each cut into windows no longer than the model's context; every window starts anew.

    Raises:
        PromptError: for an empty text on a model without BOS.
    """
    width = engine.info.context_length
    rows = [list(encode_prompt(engine.tokenizer, text, d_vocab=engine.info.d_vocab).token_ids) for text in texts]
    windows = [row[start : start + width] for row in rows for start in range(0, len(row), width)]
    return [window for window in windows if len(window) > 1]


def perplexity_cost(engine: Engine, plan: Plan, texts: Sequence[PromptLike], doses: Sequence[float]) -> pd.DataFrame:
    """Perplexity of texts under the plan at each dose, and its ratio to the unsteered model's.

    Returns:
        A row per dose: `dose`, `nll` (mean per token, nats), `perplexity`, `ppl_ratio`, `num_tokens`.
    """
    windows = windows_that_fit(engine, texts)
    base = _mean_nll(engine, None, windows)
    rows = []
    for dose in tqdm(doses, desc="cost", delay=2.0, leave=False, disable=None):
        nll, count = base if dose == 0 else _mean_nll(engine, plan.scaled(dose), windows)
        rows.append((dose, nll, float(np.exp(nll)), float(np.exp(nll - base[0])), count))
    return pd.DataFrame(rows, columns=["dose", "nll", "perplexity", "ppl_ratio", "num_tokens"])


def _mean_nll(engine: Engine, plan: Plan | None, texts: Sequence[list[int]]) -> tuple[float, int]:
    nlls = np.concatenate(text_nlls(engine, texts, plan=plan))
    return float(nlls.mean()), len(nlls)


def entropy_change(engine: Any, plan: Plan, texts: Sequence[PromptLike], policy: SamplingPolicy) -> pd.DataFrame:
    """Entropy of the policy's next-token distribution on the same texts, in both arms, teacher-forced.

    Returns:
        A row per text and token but the first: `text`, `position`, `token_id`, `base` and `steered` (nats).
    """
    rows = windows_that_fit(engine, texts)
    measures = {"entropy": lambda logits, tokens: rb_entropy(logits, policy)}
    prompts, targets = [ids[:1] for ids in rows], [[ids[1:]] for ids in rows]
    base = engine.measure(prompts, targets, measures)
    steered = engine.measure(prompts, targets, measures, plan=plan)
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "text": index,
                    "position": np.arange(1, len(ids)),
                    "token_id": ids[1:],
                    "base": base[index]["entropy"],
                    "steered": steered[index]["entropy"],
                }
            )
            for index, ids in enumerate(rows)
        ],
        ignore_index=True,
    )
