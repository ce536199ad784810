"""Perplexity of texts in sliding windows: token-weighted, every token scored exactly once.

With context C and stride S the first window holds tokens 0 … C−1. Each later window ends at most S tokens further and
reaches C tokens back; its new tokens are scored, the rest is context, and at least one already scored token always is
(so that at S = C, too, only the text's very first token goes without a score)::

    text      a b c d e f g h i j        C = 4, S = 2
    window 1  a[b c d]
    window 2      c d[e f]
    window 3          e f[g h]
    window 4              g h[i j]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PromptError
from steerlab.core.results import exp_or_inf
from steerlab.core.text import PromptLike, as_prompts, encode_prompt


@dataclass(frozen=True)
class Window:
    """A stretch of a text: tokens start … stop−1 are run, those from `first_scored` on are scored."""

    start: int
    first_scored: int
    stop: int


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        nll: mean negative log-probability per scored token, in nats.
        num_tokens: tokens scored.
        num_bytes: UTF-8 bytes of the text that the scored tokens spell; a character split over the first, unscored
            token and the next counts whole.
        context_length: tokens per window.
        stride: new tokens per window.
        token_nlls: negative log-probability of each scored token, in nats, in order.
    """

    nll: float
    num_tokens: int
    num_bytes: int
    context_length: int
    stride: int
    token_nlls: np.ndarray = field(repr=False)

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-probability per token; infinite past the largest float."""
        return exp_or_inf(self.nll)

    @property
    def bits_per_byte(self) -> float:
        """Total negative log-probability in bits, per byte of scored text; NaN if the tokens spell no text."""
        total = self.nll * self.num_tokens / math.log(2)
        return total / self.num_bytes if self.num_bytes else math.nan


def sliding_windows(n_tokens: int, context_length: int, stride: int, *, score_first: bool = False) -> list[Window]:
    """Windows that together score every token once (the first one only with `score_first`).

    Args:
        n_tokens: length of the text.
        context_length: tokens per window, at least 2.
        stride: new tokens per window, 1 to context_length.
        score_first: the first token is scored too, because a BOS stands before it.

    Raises:
        InputError: for a context or stride outside its range.
    """
    _check_sizes(context_length, stride)
    stop = min(context_length, n_tokens)
    windows = [Window(0, 0 if score_first else 1, stop)]
    while stop < n_tokens:
        scored = stop
        stop = min(scored + min(stride, context_length - 1), n_tokens)
        windows.append(Window(max(0, stop - context_length), scored, stop))
    return windows


def _check_sizes(context_length: int, stride: int) -> None:
    for name, value in (("context_length", context_length), ("stride", stride)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{name} is an integer, got {value!r}.")
    if context_length < 2:
        raise InputError(f"context_length must be at least 2, got {context_length}.")
    if not 1 <= stride <= context_length:
        raise InputError(f"stride must be between 1 and the context length of {context_length}, got {stride}.")


def perplexity(
    engine: Engine,
    text_or_ids: PromptLike,
    *,
    context_length: int | None = None,
    stride: int | None = None,
    bos_each_window: bool = False,
    plan: Any = None,
) -> Perplexity:
    """Perplexity of one text: exp(Σ nll / N) over all its tokens but the first.

    With a plan the first token of each window counts as the prompt and the rest as generated, so that the default
    positions edit every token.

    Args:
        engine: the engine to score with.
        text_or_ids: the text, or its token ids.
        context_length: tokens per window; the model's context by default.
        stride: new tokens per window; the context length by default.
        bos_each_window: put BOS before every window; the text's first token is then scored too.
        plan: a plan, or None.

    Raises:
        PromptError: for a text too short to score, or several texts.
        InputError: for a context or stride outside its range, or `bos_each_window` on a model without BOS.
    """
    if isinstance(text_or_ids, str) and not text_or_ids:
        raise PromptError("The text is empty; there is nothing to score.")
    texts = as_prompts(text_or_ids)
    if len(texts) > 1:
        raise PromptError(f"perplexity takes one text, got {len(texts)}; call it once per text.")
    ids = encode_prompt(engine.tokenizer, texts[0], d_vocab=engine.info.d_vocab).token_ids
    prefix = _bos(engine) if bos_each_window else ()
    longest = engine.info.context_length
    context = longest if context_length is None else context_length
    step = context if stride is None else stride
    _check_sizes(context, step)
    if context > longest:
        raise InputError(f"context_length={context} exceeds the model's context of {longest} tokens.")
    if bos_each_window and ids[:1] == prefix:
        ids = ids[1:]
    if len(ids) + len(prefix) < 2:
        raise PromptError(f"The text has {len(ids)} tokens; perplexity needs at least two.")
    inner = context - len(prefix)
    windows = sliding_windows(len(ids), inner, min(step, inner), score_first=bos_each_window)
    nlls = _window_nlls(engine, [(prefix + ids[w.start : w.stop], w.stop - w.first_scored) for w in windows], plan)
    num_bytes = _num_bytes(engine, ids) - (0 if bos_each_window else _num_bytes(engine, ids[:1]))
    return _summary(np.concatenate(nlls), num_bytes, context, step)


def text_nlls(engine: Engine, texts: Sequence[PromptLike], *, plan: Any = None) -> list[np.ndarray]:
    """Negative log-probability in nats of every token but the first, for many texts that each fit the context.

    Raises:
        PromptError: for a text of fewer than two tokens.
    """
    rows = [encode_prompt(engine.tokenizer, text, d_vocab=engine.info.d_vocab).token_ids for text in texts]
    for index, ids in enumerate(rows):
        if len(ids) < 2:
            raise PromptError(f"Text {index} has {len(ids)} token; scoring needs at least two.")
    return _window_nlls(engine, [(ids, len(ids) - 1) for ids in rows], plan)


def _window_nlls(engine: Engine, windows: Sequence[tuple[tuple[int, ...], int]], plan: Any) -> list[np.ndarray]:
    """The last n negative log-probabilities of each (ids, n); a window's first token is its prompt."""
    scores = engine.score([ids[:1] for ids, _ in windows], [[ids[1:]] for ids, _ in windows], plan=plan)
    return [-np.array(score.token_log_probs)[-n:] for score, (_, n) in zip(scores, windows, strict=True)]


def _bos(engine: Engine) -> tuple[int, ...]:
    bos = engine.tokenizer.bos_token_id
    if bos is None:
        raise InputError("bos_each_window=True needs a BOS token, and this model has none.")
    return (bos,)


def _num_bytes(engine: Engine, ids: Sequence[int]) -> int:
    """UTF-8 bytes of the whole characters that these ids spell; special tokens spell none."""
    spelled = engine.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(spelled.replace("\ufffd", "").encode("utf-8"))


def _summary(nlls: np.ndarray, num_bytes: int, context: int, stride: int) -> Perplexity:
    return Perplexity(
        nll=math.fsum(nlls) / len(nlls),
        num_tokens=len(nlls),
        num_bytes=num_bytes,
        context_length=context,
        stride=stride,
        token_nlls=nlls,
    )
