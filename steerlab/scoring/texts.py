"""Scores of many texts at once, such as the neutral texts of an experiment."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from steerlab.core._text import PromptLike, encode_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import PromptError
from steerlab.scoring.windows import TextWindow, check_positions, sliding_windows


def text_windows(engine: Engine, texts: Sequence[PromptLike]) -> list[TextWindow]:
    """Windows as long as the model's context that together score every token of every text but its first.

    Raises:
        PromptError: for a text of fewer than two tokens.
    """
    found = []
    for index, text in enumerate(texts):
        ids = encode_prompt(engine.tokenizer, text, d_vocab=engine.info.d_vocab).token_ids
        if len(ids) < 2:
            raise PromptError(f"Scoring needs at least two tokens; text {index} has {len(ids)}.")
        context = engine.info.context_length
        for w in sliding_windows(len(ids), context, context):
            found.append(replace(w, text=index, ids=ids[w.start : w.stop]))
    return found


def text_nlls(engine: Engine, texts: Sequence[PromptLike], *, plan: Any = None) -> list[np.ndarray]:
    """Negative log-probability in nats of every token but the first, for many texts; long ones run in windows.

    Raises:
        PromptError: for a text of fewer than two tokens.
        PlanError: for positions that the windows of a long text cannot honour.
    """
    windows = text_windows(engine, texts)
    check_window_positions(plan, windows)
    nlls = window_nlls(engine, [(window.ids, window.n_scored) for window in windows], plan)
    return [
        np.concatenate([part for part, window in zip(nlls, windows, strict=True) if window.text == index])
        for index in range(len(texts))
    ]


def check_window_positions(plan: Any, windows: Sequence[TextWindow]) -> None:
    """Checks that every edit of a plan, if there is one, acts on the same tokens in windows as in their whole texts.

    Raises:
        PlanError: otherwise.
    """
    for _, group in groupby(windows, key=attrgetter("text")):
        parts = list(group)
        if plan is not None and len(parts) > 1:
            check_positions(plan, parts, parts[-1].stop, 0)


def window_nlls(engine: Engine, windows: Sequence[tuple[tuple[int, ...], int]], plan: Any) -> list[np.ndarray]:
    """The last n negative log-probabilities of each (ids, n); a window's first token is its prompt."""
    scores = engine.score([ids[:1] for ids, _ in windows], [[ids[1:]] for ids, _ in windows], plan=plan)
    return [-np.array(score.token_log_probs)[-n:] for score, (_, n) in zip(scores, windows, strict=True)]
