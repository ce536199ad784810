"""Texts with tokens coloured by what a model makes of them: a projection, a log-prob, its change, an entropy."""

import math
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PromptError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.spelling import token_text
from steerlab.core.text import PromptLike, as_prompts, encode_prompt
from steerlab.display import Scale, TokenView, diverging, sequential, tokens
from steerlab.measures.quantities import PolicyEntropy, Quantity, TokenLogProb
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector

Value = Literal["projection", "log_prob", "delta_log_prob", "entropy"]
_LABELS: Final = {
    "projection": ("projection on {vector}", ""),
    "log_prob": ("log p of each token given those before it", "nats"),
    "delta_log_prob": ("Δ log p, steered − unsteered", "nats"),
    "entropy": ("entropy of the prediction of each token", "nats"),
}


def show_tokens(
    engine: Engine,
    text: PromptLike | Sequence[PromptLike],
    *,
    vector: SteeringVector | None = None,
    plan: Plan | None = None,
    value: Value | None = None,
    chat: bool = False,
) -> TokenView:
    """Shows texts with their tokens coloured by a number per token, exact on hover.

    Args:
        engine: what runs the model.
        text: a text (or messages, or ids), or several.
        vector: the direction u that the stream is projected on, u·h at the vector's hook point.
        plan: a plan that is active meanwhile. Tokens after the first count as generated, as in `sl.perplexity`; for a
            projection the whole text is a prompt, as in `capture`.
        value: `projection` on the vector; `log_prob` of each token given those before it; `delta_log_prob`, steered
            minus unsteered; or `entropy` of the prediction. By default what fits: `projection` with a vector,
            `delta_log_prob` with a plan, else `log_prob`. The first token is not predicted and has no colour; of a
            projection it is shown, and left out of the scale.
        chat: take a string as a user turn of a chat.

    Raises:
        InputError: for an unknown value, or one that needs the vector or the plan.
        PromptError: for a text of a single token, of which nothing is predicted.

    Examples:
        >>> from steerlab.engines.toy import ToyEngine
        >>> show_tokens(ToyEngine(), "abc")
        TokenView(log p of each token given those before it, 1 texts, 3 tokens)
    """
    chosen = _chosen(value, vector, plan)
    encoded = [
        encode_prompt(engine.tokenizer, one, chat=chat, d_vocab=engine.info.d_vocab).token_ids
        for one in as_prompts(text)
    ]
    if chosen == "projection":
        assert vector is not None
        values = _projections(engine, encoded, vector, plan)
    else:
        values = _predicted(engine, encoded, chosen, plan)
    label, unit = _LABELS[chosen]
    but_first = [number for row in values for number in (row[1:] if len(row) > 1 else row)]
    return tokens(
        [[token_text(engine.tokenizer, token) for token in ids] for ids in encoded],
        values,
        label=label.format(vector=(vector and vector.name) or "the vector"),
        unit=unit,
        scale=_scale(chosen, but_first),
    )


def _scale(value: str, numbers: Sequence[float]) -> Scale:
    """The colours; the first token is left out, because its stream is often a hundred times as long as any other."""
    if value == "entropy":
        return sequential(numbers)
    scale = diverging(numbers)
    return Scale(scale.low, 0.0, True) if value == "log_prob" else scale


def _chosen(value: str | None, vector: SteeringVector | None, plan: Plan | None) -> str:
    chosen = value or ("projection" if vector is not None else "delta_log_prob" if plan is not None else "log_prob")
    if chosen not in _LABELS:
        raise InputError(f"value is one of {', '.join(_LABELS)}; got {value!r}.")
    if chosen == "projection" and vector is None:
        raise InputError("A projection needs vector=, the direction to project on.")
    if chosen == "delta_log_prob" and plan is None:
        raise InputError("A change of log p needs plan=, the plan whose effect is shown.")
    return chosen


def _projections(
    engine: Engine, texts: Sequence[tuple[int, ...]], vector: SteeringVector, plan: Plan | None
) -> list[np.ndarray]:
    ids = [list(text) for text in texts]
    found = engine.capture(ids, layers=[vector.layer], site=vector.site, plan=plan)
    return [(found.of(index, vector.layer) @ vector.unit).double().numpy() for index in range(len(ids))]


def _predicted(engine: Engine, texts: Sequence[tuple[int, ...]], value: str, plan: Plan | None) -> list[np.ndarray]:
    quantity: Quantity = PolicyEntropy(SamplingPolicy()) if value == "entropy" else TokenLogProb()
    found = _measured(engine, texts, quantity, plan)
    if value != "delta_log_prob":
        return found
    base = _measured(engine, texts, quantity, None)
    return [steered - plain for steered, plain in zip(found, base, strict=True)]


def _measured(
    engine: Engine, texts: Sequence[tuple[int, ...]], quantity: Quantity, plan: Plan | None
) -> list[np.ndarray]:
    """A number per token; NaN for the first, which nothing predicts."""
    for index, ids in enumerate(texts):
        if len(ids) < 2:
            raise PromptError(
                f"Text {index} has one token, and its first token is never predicted; show a longer text."
            )
    rows = engine.measure(
        [list(ids[:1]) for ids in texts], [[list(ids[1:])] for ids in texts], {"x": quantity}, plan=plan
    )
    return [np.concatenate([[math.nan], row["x"]]) for row in rows]
