"""What stands next after prompts: the odds of tokens, and how far a plan moves the whole distribution."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import torch

from steerlab.core._text import PromptLike
from steerlab.core.errors import InputError
from steerlab.experiment._store.cells import Cell
from steerlab.experiment._store.plans import resolved
from steerlab.experiment._store.run import Run
from steerlab.measures.divergence import normalised_kl
from steerlab.measures.quantities import LogDistribution
from steerlab.measures.ratings import rating_probs
from steerlab.protocols._recording import scoring_engine
from steerlab.steering.plan import Plan

EPSILON: Final = 1e-8


def refusal_log_odds(run: Run, prompts: list[str], plan: Plan | None, tokens: list[str], *, chat: bool) -> np.ndarray:
    """Log-odds that a reply begins with one of some texts, from their exact probabilities, shape [prompts].

    log(p + ε) − log(1 − p + ε) with p the probability of all of them and ε = 1e-8.

    Raises:
        InputError: if two of the texts have the same tokens, or one joins the prompt's last token.
    """
    ready = None if plan is None else resolved(run.session, plan)
    scores = scoring_engine(run).score(prompts, [tokens] * len(prompts), plan=ready, chat=chat)
    found: list[list[Any]] = [[] for _ in prompts]
    for score in scores:
        if score.boundary == "merged":
            raise InputError(f"The tokenizer joins {tokens[score.target_index]!r} with the end of the prompt.")
        found[score.prompt_index].append(score)
    odds = []
    for own in found:
        try:
            _, p = rating_probs(np.array([one.log_prob for one in own]), [one.token_ids for one in own])
        except ValueError as error:
            raise InputError(f"Refusal tokens must differ: {error}") from error
        odds.append(np.log(p + EPSILON) - np.log(max(0.0, 1 - p) + EPSILON))
    return np.array(odds)


def kl_of_next_tokens(run: Run, prompts: Sequence[PromptLike], plan: Plan, *, chat: bool) -> np.ndarray:
    """KL(unsteered ‖ plan) of the next-token distribution after each prompt, nats, shape [prompts]; a cell."""
    session, ready = run.session, resolved(run.session, plan)
    what = {"plan": ready.hash, "data": session.inputs.add_data(list(prompts)), "chat": chat}
    cell = Cell("next_token_kl", what, {"plan": session.inputs.add_plan(ready)})

    def measured() -> pd.DataFrame:
        base, steered = (_log_distributions(run, prompts, one, chat) for one in (None, ready))
        return pd.DataFrame({"kl": normalised_kl(base, steered).double().numpy()})

    return session.cells.get(cell, session.engine_hash, measured).kl.to_numpy()


def _log_distributions(run: Run, prompts: Sequence[PromptLike], plan: Plan | None, chat: bool) -> torch.Tensor:
    """Log-distributions of what follows each prompt, shape [prompts, d_vocab]; the target only marks the place."""
    engine = run.session.engine
    mark = [int(engine.tokenizer.eos_token_id or 0)]
    found = engine.measure(prompts, [[mark]] * len(prompts), {"log_p": LogDistribution()}, plan=plan, chat=chat)
    return torch.stack([torch.as_tensor(row["log_p"][0]) for row in found])
