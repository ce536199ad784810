"""Texts with tokens coloured by what a model and a plan make of them."""

import math
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from steerlab.core._spelling import token_text
from steerlab.core._text import PromptLike, as_prompts, encode_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PromptError
from steerlab.core.policy import SamplingPolicy
from steerlab.display import Scale, TokenView, diverging, sequential, tokens
from steerlab.measures.quantities import PolicyEntropy, Quantity, TokenLogProb
from steerlab.scoring.divergence import divergence
from steerlab.steering.explain import explain
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import SteeringVector, check_width

Value = Literal["projection", "log_prob", "delta_log_prob", "entropy", "kl", "edited"]
_LABELS: Final = {
    "projection": ("projection on {vector}", ""),
    "log_prob": ("log p of each token given those before it", "nats"),
    "delta_log_prob": ("Δ log p, steered − unsteered", "nats"),
    "entropy": ("entropy of the prediction of each token", "nats"),
    "kl": ("KL(steered ‖ unsteered) of the prediction of each token", "nats"),
    "edited": ("edits that reach each token", "edits"),
}


def show_tokens(
    engine: Engine,
    text: PromptLike | Sequence[PromptLike],
    *,
    vector: SteeringVector | None = None,
    plan: Plan | None = None,
    value: Value | None = None,
    names: Sequence[str] | None = None,
    aligned: bool = False,
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
            minus unsteered; `entropy` of the prediction; `kl`, KL(steered ‖ unsteered) of the prediction; or `edited`,
            how many of the plan's edits reach the token. By default what fits: `projection` with a vector,
            `delta_log_prob` with a plan, else `log_prob`. The first token is not predicted and has no colour; of a
            projection it is shown, and left out of the scale.
        names: what stands before each text.
        aligned: put the k-th tokens of all texts below each other, to compare texts that differ in a few tokens.
        chat: take a string as a user turn of a chat.

    Raises:
        InputError: for an unknown value, or one that needs the vector or the plan.
        VectorMismatchError: for a vector of another width.
        PromptError: for a text of a single token, of which nothing is predicted.

    Examples:
        >>> from steerlab.engines.toy import ToyEngine
        >>> show_tokens(ToyEngine(), "abc")
        TokenView(log p of each token given those before it, 1 text, 3 tokens)
    """
    chosen = _chosen(value, vector, plan)
    encoded = [
        encode_prompt(engine.tokenizer, one, chat=chat, d_vocab=engine.info.d_vocab).token_ids
        for one in as_prompts(text)
    ]
    if chosen == "projection":
        assert vector is not None
        check_width(vector, engine.info)
        values = _projections(engine, encoded, vector, plan)
    elif chosen == "edited":
        assert plan is not None
        values = [_edits(engine, ids, plan) for ids in encoded]
    elif chosen == "kl":
        values = [_divergences(engine, index, ids, plan) for index, ids in enumerate(encoded)]
    else:
        values = _predicted(engine, encoded, chosen, plan)
    label, unit = _LABELS[chosen]
    but_first = [number for row in values for number in (row[1:] if len(row) > 1 else row)]
    return tokens(
        [[token_text(engine.tokenizer, token) for token in ids] for ids in encoded],
        values,
        label=label.format(vector=(vector and vector.name) or "the vector"),
        unit=unit,
        names=names,
        aligned=aligned,
        scale=_scale(chosen, but_first),
    )


def _scale(value: str, numbers: Sequence[float]) -> Scale:
    """The colours; the first token is left out, because its stream is often a hundred times as long as any other."""
    if value in ("entropy", "kl", "edited"):
        return sequential(numbers, low=None if value == "entropy" else 0.0)
    scale = diverging(numbers)
    return Scale(scale.low, 0.0, True) if value == "log_prob" else scale


def _chosen(value: str | None, vector: SteeringVector | None, plan: Plan | None) -> str:
    chosen = value or ("projection" if vector is not None else "delta_log_prob" if plan is not None else "log_prob")
    if chosen not in _LABELS:
        raise InputError(f"value is one of {', '.join(_LABELS)}; got {value!r}.")
    if chosen == "projection" and not isinstance(vector, SteeringVector):
        given = "" if vector is None else f" (a SteeringVector); got {type(vector).__name__}"
        raise InputError(f"A projection needs vector=, the direction to project on{given}.")
    if chosen in ("delta_log_prob", "kl", "edited") and plan is None:
        raise InputError(f"{chosen} needs plan=, the plan whose effect is shown.")
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


def _edits(engine: Engine, ids: tuple[int, ...], plan: Plan) -> np.ndarray:
    """How many edits reach each token, the first of which is the prompt; conditions count as passed."""
    rest = list(ids[1:])
    found = explain(plan, list(ids[:1]), engine, completion=rest or None)
    return np.array([sum(len(column[t]) for column in found.cells.values()) for t in range(len(ids))], dtype=float)


def _divergences(engine: Engine, index: int, ids: tuple[int, ...], plan: Plan | None) -> np.ndarray:
    """KL(steered ‖ unsteered) per token; NaN for the first, which nothing predicts."""
    _check_predicted(index, ids)
    return np.concatenate([[math.nan], divergence(engine, engine, list(ids), plan_a=plan).kl])


def _check_predicted(index: int, ids: tuple[int, ...]) -> None:
    if len(ids) < 2:
        raise PromptError(f"Text {index} has one token, and its first token is never predicted; show a longer text.")


def _measured(
    engine: Engine, texts: Sequence[tuple[int, ...]], quantity: Quantity, plan: Plan | None
) -> list[np.ndarray]:
    """A number per token; NaN for the first, which nothing predicts."""
    for index, ids in enumerate(texts):
        _check_predicted(index, ids)
    rows = engine.measure(
        [list(ids[:1]) for ids in texts], [[list(ids[1:])] for ids in texts], {"x": quantity}, plan=plan
    )
    return [np.concatenate([[math.nan], row["x"]]) for row in rows]
