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
import torch

from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PlanError, PromptError
from steerlab.core.results import exp_or_inf
from steerlab.core.text import PromptLike, as_prompts, encode_prompt
from steerlab.steering.positions import RowPositions
from steerlab.steering.sets import Ids, Marked


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

    With a plan the text's first token counts as the prompt and the rest as generated, so that the default positions
    edit every token. Positions that would mean something else in a later window (`index`, `prompt`, a stretch of
    `generated`) are refused if the text needs several windows.

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
        PlanError: for positions that several windows cannot honour.
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
    if plan is not None and len(windows) > 1:
        _check_positions(plan, windows, len(ids), len(prefix))
    nlls = _window_nlls(engine, [(prefix + ids[w.start : w.stop], w.stop - w.first_scored) for w in windows], plan)
    num_bytes = _num_bytes(engine, ids) - (0 if bos_each_window else _num_bytes(engine, ids[:1]))
    return _summary(np.concatenate(nlls), num_bytes, context, step)


@dataclass(frozen=True)
class TextWindow:
    """A window of one of several texts.

    Attributes:
        text: which text.
        ids: the tokens that are run.
        first_scored: absolute position, in the text, of the first token scored here.
        n_scored: how many of the last tokens are scored.
    """

    text: int
    ids: tuple[int, ...]
    first_scored: int
    n_scored: int

    @property
    def place(self) -> Window:
        """The stretch of the text that it is."""
        stop = self.first_scored + self.n_scored
        return Window(stop - len(self.ids), self.first_scored, stop)


def text_windows(engine: Engine, texts: Sequence[PromptLike]) -> list[TextWindow]:
    """Windows as long as the model's context that together score every token of every text but its first.

    Raises:
        PromptError: for a text of fewer than two tokens.
    """
    found = []
    for index, text in enumerate(texts):
        ids = encode_prompt(engine.tokenizer, text, d_vocab=engine.info.d_vocab).token_ids
        if len(ids) < 2:
            raise PromptError(f"Text {index} has {len(ids)} token; scoring needs at least two.")
        context = engine.info.context_length
        for w in sliding_windows(len(ids), context, context):
            found.append(TextWindow(index, ids[w.start : w.stop], w.first_scored, w.stop - w.first_scored))
    return found


def text_nlls(engine: Engine, texts: Sequence[PromptLike], *, plan: Any = None) -> list[np.ndarray]:
    """Negative log-probability in nats of every token but the first, for many texts; long ones run in windows.

    Raises:
        PromptError: for a text of fewer than two tokens.
        PlanError: for positions that the windows of a long text cannot honour.
    """
    windows = text_windows(engine, texts)
    if plan is not None:
        for index in range(len(texts)):
            parts = [window.place for window in windows if window.text == index]
            if len(parts) > 1:
                _check_positions(plan, parts, parts[-1].stop, 0)
    nlls = _window_nlls(engine, [(window.ids, window.n_scored) for window in windows], plan)
    return [
        np.concatenate([part for part, window in zip(nlls, windows, strict=True) if window.text == index])
        for index in range(len(texts))
    ]


def _window_nlls(engine: Engine, windows: Sequence[tuple[tuple[int, ...], int]], plan: Any) -> list[np.ndarray]:
    """The last n negative log-probabilities of each (ids, n); a window's first token is its prompt."""
    scores = engine.score([ids[:1] for ids, _ in windows], [[ids[1:]] for ids, _ in windows], plan=plan)
    return [-np.array(score.token_log_probs)[-n:] for score, (_, n) in zip(scores, windows, strict=True)]


def _check_positions(plan: Any, windows: Sequence[Window], n_tokens: int, n_prefix: int) -> None:
    """Nothing, if every edit acts on the same tokens in the windows as it would in the whole text."""
    whole = RowPositions.of_rows([n_tokens + n_prefix], [1])
    for edit in plan:
        if edit.schedule is not None or edit.when is not None or any(map(_looks_inside, edit.where.leaves())):
            raise PlanError(
                f"{edit} cannot be followed over {len(windows)} windows; score a text that fits one window."
            )
        wanted = edit.where.resolve(whole)[0, n_prefix:]
        for window in windows:
            rows = RowPositions.of_rows([window.stop - window.start + n_prefix], [1])
            if not torch.equal(edit.where.resolve(rows)[0, n_prefix:-1], wanted[window.start : window.stop - 1]):
                raise PlanError(
                    f"{edit} depends on the place in the text, which {len(windows)} windows cannot keep; score a text "
                    "that fits one window, or edit where.all()."
                )


def _looks_inside(where: Any) -> bool:
    """Whether a set depends on what the tokens are, not only on where they stand."""
    return isinstance(where, Ids | Marked)


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
