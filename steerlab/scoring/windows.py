"""Sliding windows over a text: every token scored exactly once, each window after the first with scored context.

With context C and stride S the first window holds tokens 0 … C−1. Each later window ends at most S tokens further and
reaches C tokens back; its new tokens are scored, the rest is context, and at least one already scored token always is
(so that at S = C, too, only the text's very first token goes without a score)::

    text      a b c d e f g h i j        C = 4, S = 2
    window 1  a[b c d]
    window 2      c d[e f]
    window 3          e f[g h]
    window 4              g h[i j]
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from steerlab.core._numbers import as_integer, shown
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PlanError
from steerlab.steering.positions._by_tokens import ByTokens
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Generated, Index, Marked


@dataclass(frozen=True)
class TextWindow:
    """A stretch of a text: tokens start … stop−1 are run, those from `first_scored` on are scored.

    Attributes:
        start: absolute position, in the text, of the first token that is run.
        first_scored: that of the first token scored here.
        stop: that after the last one.
        ids: the tokens that are run, once they are read.
        text: which of several texts.
        digest: hash of the text's ids up to the window's end, where it is needed.
    """

    start: int
    first_scored: int
    stop: int
    ids: tuple[int, ...] = field(default=(), repr=False)
    text: int = 0
    digest: bytes = field(default=b"", repr=False)

    @property
    def n_scored(self) -> int:
        """How many of its last tokens are scored."""
        return self.stop - self.first_scored


@dataclass(frozen=True)
class WindowSizes:
    """How a text is cut into windows on one or several engines.

    Attributes:
        context: tokens per window, a BOS put before it included.
        stride: new tokens per window.
        prefix: what stands before every window: nothing, or BOS; with BOS the text's first token is scored too.
    """

    context: int
    stride: int
    prefix: tuple[int, ...] = ()

    @property
    def inner(self) -> tuple[int, int]:
        """Context and stride without the prefix."""
        inner = self.context - len(self.prefix)
        return inner, min(self.stride, inner)


def window_sizes(
    engines: Sequence[Engine],
    context_length: int | None = None,
    stride: int | None = None,
    *,
    at_most: int | None = None,
    bos_each_window: bool = False,
) -> WindowSizes:
    """The requested sizes, or the defaults: the shortest context of the engines, and a stride of the whole context.

    Args:
        engines: the engines that run the windows.
        context_length: tokens per window.
        stride: new tokens per window.
        at_most: a bound on the default context.
        bos_each_window: put BOS before every window.

    Raises:
        InputError: for a size outside its range, or `bos_each_window` on a model without BOS.
    """
    longest = min(engine.info.context_length for engine in engines)
    default = longest if at_most is None else max(2, min(longest, at_most))
    context = default if context_length is None else context_length
    step = context if stride is None else stride
    check_sizes(context, step)
    context, step = int(context), int(step)
    if context > longest:
        raise InputError(f"context_length={context} exceeds the model's context of {longest} tokens.")
    sizes = WindowSizes(context, step, _bos(engines[0]) if bos_each_window else ())
    check_sizes(*sizes.inner)
    return sizes


def _bos(engine: Engine) -> tuple[int, ...]:
    bos = engine.tokenizer.bos_token_id
    if bos is None:
        raise InputError("bos_each_window=True needs a BOS token, and this model has none.")
    return (bos,)


def check_sizes(context_length: int, stride: int) -> None:
    """Checks that the sizes are possible.

    Raises:
        InputError: otherwise.
    """
    for name, value in (("context_length", context_length), ("stride", stride)):
        if as_integer(value) is None:
            raise InputError(f"{name} is an integer, got {shown(value)}.")
    if context_length < 2:
        raise InputError(f"context_length must be at least 2, got {context_length}.")
    if not 1 <= stride <= context_length:
        raise InputError(f"stride must be between 1 and the context length of {context_length}, got {stride}.")


def sliding_windows(n_tokens: int, context_length: int, stride: int, *, score_first: bool = False) -> list[TextWindow]:
    """Windows that together score every token once (the first one only with `score_first`).

    Args:
        n_tokens: length of the text.
        context_length: tokens per window, at least 2.
        stride: new tokens per window, 1 to context_length.
        score_first: the first token is scored too, because a BOS stands before it.

    Raises:
        InputError: for a context or stride outside its range.
    """
    check_sizes(context_length, stride)
    windows = [TextWindow(0, 0 if score_first else 1, min(context_length, n_tokens))]
    while windows[-1].stop < n_tokens:
        windows.append(_next(windows[-1], n_tokens, context_length, stride))
    return windows


def _next(window: TextWindow, n_tokens: int, context_length: int, stride: int) -> TextWindow:
    stop = min(window.stop + min(stride, context_length - 1), n_tokens)
    return TextWindow(max(0, stop - context_length), window.stop, stop)


def stream_windows(
    pieces: Iterable[Sequence[int]], context_length: int, stride: int, *, score_first: bool = False
) -> Iterator[TextWindow]:
    """The windows of `sliding_windows` with their tokens, over a text that comes in pieces and need not fit in memory.

    Args:
        pieces: the text's ids, piece after piece.
        context_length: tokens per window, at least 2.
        stride: new tokens per window, 1 to context_length.
        score_first: the first token is scored too.
    """
    check_sizes(context_length, stride)
    tokens = _Tokens(iter(pieces))
    window = TextWindow(0, 0 if score_first else 1, tokens.reach(context_length, keep=0))
    yield tokens.into(window)
    while (available := tokens.reach(window.stop + stride, keep=window.start)) > window.stop:
        window = _next(window, available, context_length, stride)
        yield tokens.into(window)


class _Tokens:
    """The part of a text that later windows need."""

    def __init__(self, pieces: Iterator[Sequence[int]]) -> None:
        self.pieces = pieces
        self.start = 0
        self.held = np.zeros(0, dtype=np.int64)

    def reach(self, stop: int, *, keep: int) -> int:
        """Reads pieces until token `stop` is there or the text ends; the end of what is there, at most `stop`."""
        while self.start + len(self.held) < stop:
            piece = next(self.pieces, None)
            if piece is None:
                break
            self.held = np.concatenate([self.held[keep - self.start :], np.asarray(piece, dtype=np.int64)])
            self.start = keep
        return min(stop, self.start + len(self.held))

    def into(self, window: TextWindow) -> TextWindow:
        ids = self.held[window.start - self.start : window.stop - self.start]
        return replace(window, ids=tuple(ids.tolist()))


def check_positions(plan: Any, windows: Sequence[TextWindow], n_tokens: int, n_prefix: int) -> None:
    """Checks that every edit acts on the same tokens in the windows as it would in the whole text.

    Raises:
        PlanError: otherwise.
    """
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


def check_streamed_positions(plan: Any, sizes: WindowSizes) -> None:
    """Checks that every edit acts alike in all windows of a text whose length is not known yet.

    Sets that count no positions treat all windows after the first the same, so the first few stand for all.

    Raises:
        PlanError: for a set that counts positions, or looks inside the text.
    """
    for edit in plan:
        if any(map(_counts, edit.where.leaves())):
            raise PlanError(
                f"{edit} counts positions, which cannot be followed over the windows of a streamed text; edit "
                "where.all(), leave `where` at its default, or score a text that fits one window."
            )
    context, stride = sizes.inner
    windows = sliding_windows(context + 3 * stride, context, stride, score_first=bool(sizes.prefix))
    check_positions(plan, windows, windows[-1].stop, len(sizes.prefix))


def _looks_inside(where: Any) -> bool:
    """Whether a set depends on what the tokens are, not only on where they stand."""
    return isinstance(where, ByTokens | Marked)


def _counts(where: Any) -> bool:
    """Whether a set names positions by number."""
    return isinstance(where, Index) or (isinstance(where, Generated) and (where.after > 0 or where.until is not None))
