"""The windows of one text, read as they are needed."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from steerlab.core._spelling import spelled_bytes
from steerlab.core._text import first_token_bytes
from steerlab.core.engine import Engine
from steerlab.core.errors import PromptError
from steerlab.scoring._journal import TextDigest
from steerlab.scoring._source import Source, TextLike, open_source
from steerlab.scoring.windows import (
    TextWindow,
    WindowSizes,
    check_positions,
    check_streamed_positions,
    sliding_windows,
    stream_windows,
)


class TextWindows:
    """The windows of one text, in order and once, with its bytes and identity known at the end.

    Args:
        engine: whose tokenizer and limits hold.
        text: the text.
        sizes: of the windows.
        *plans: what runs on them; one whose positions mean something else in a later window is refused.

    Raises:
        PromptError: for a text too short to score.
        PlanError: for positions that several windows cannot honour.
    """

    def __init__(self, engine: Engine, text: TextLike, sizes: WindowSizes, *plans: Any) -> None:
        self.tokenizer = engine.tokenizer
        self.sizes = sizes
        self.source: Source = open_source(engine, text)
        self._spelled = self._unscored = 0
        self._digest = TextDigest()
        self._pending: TextWindow | None = None
        self._first_piece = True
        self._windows = stream_windows(self._pieces(), *sizes.inner, score_first=bool(sizes.prefix))
        self._start()
        for plan in plans:
            self._check(plan)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text that the scored tokens stand for; complete once every window has been taken."""
        return (self._spelled if self.source.text is None else self.source.text.num_bytes) - self._unscored

    @property
    def n_scored(self) -> int | None:
        """How many tokens are scored in all, if that is known before the end."""
        n_tokens = self.source.n_tokens
        return None if n_tokens is None else n_tokens - (0 if self.sizes.prefix else 1)

    def __iter__(self) -> Iterator[TextWindow]:
        while (found := self.take()) is not None:
            yield found

    def take(self) -> TextWindow | None:
        """The next window; None at the end."""
        window = self._pending or next(self._windows, None)
        self._pending = None
        if window is None:
            return None
        self._digest.add(window)
        return replace(window, digest=self._digest.digest())

    def _start(self) -> None:
        self._pending = window = next(self._windows)
        if window.stop + len(self.sizes.prefix) < 2:
            raise PromptError(f"Scoring needs at least two tokens; the text has {window.stop}.")
        if not self.sizes.prefix:
            self._unscored = self._bytes_of_first(window.ids[0])

    def _pieces(self) -> Iterator[tuple[int, ...]]:
        for ids in self.source.pieces:
            if self.source.text is None:
                self._spelled += spelled_bytes(self.tokenizer, (), ids)
            if self._first_piece and self.sizes.prefix and ids[:1] == self.sizes.prefix:
                self._unscored = self._bytes_of_first(ids[0])
                ids = ids[1:]
                if self.source.n_tokens is not None:
                    self.source.n_tokens -= 1
            self._first_piece = False
            yield ids

    def _bytes_of_first(self, token_id: int) -> int:
        if self.source.text is None:
            return spelled_bytes(self.tokenizer, (), [token_id])
        return first_token_bytes(self.tokenizer, self.source.text.head, token_id)

    def _check(self, plan: Any) -> None:
        if plan is None:
            return
        if self.source.n_tokens is None:
            check_streamed_positions(plan, self.sizes)
            return
        windows = sliding_windows(self.source.n_tokens, *self.sizes.inner, score_first=bool(self.sizes.prefix))
        if len(windows) > 1:
            check_positions(plan, windows, self.source.n_tokens, len(self.sizes.prefix))


def batched(parts: Iterable[TextWindow], budget: int) -> Iterator[list[TextWindow]]:
    """Windows in order, in batches of at most `budget` tokens; a window longer than that is alone."""
    batch: list[TextWindow] = []
    size = 0
    for part in parts:
        if batch and size + len(part.ids) > budget:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += len(part.ids)
    if batch:
        yield batch


def window_values(
    engine: Any, ids: tuple[int, ...], n_scored: int, quantities: Any, plan: Any
) -> dict[str, np.ndarray]:
    """Quantities of the last n predictions of a window; its first token is its prompt."""
    (found,) = engine.measure([ids[:1]], [[ids[1:]]], quantities, plan=plan)
    return {name: values[-n_scored:] for name, values in found.items()}
