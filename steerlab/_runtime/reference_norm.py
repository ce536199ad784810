"""The reference text on which the unit of a dose is measured: the median norm of the stream."""

from typing import Any

from steerlab.core._text import encode_prompt
from steerlab.core.shipped import reference_text

WINDOW = 256  # tokens; every engine cuts the text alike, so that a dose is the same on each


def reference_windows(tokenizer: Any, d_vocab: int, context_length: int | None) -> list[list[int]]:
    """The shipped reference text in windows of at most 256 tokens, or of the context if that is shorter.

    A window's first token is left out of the norms, so a window of a single token is left out as a whole.

    Args:
        tokenizer: the model's own tokenizer.
        d_vocab: number of logits.
        context_length: the longest sequence of the model; None if it states none.
    """
    ids = encode_prompt(tokenizer, reference_text(), d_vocab=d_vocab).token_ids
    width = window_width(context_length)
    windows = [list(ids[start : start + width]) for start in range(0, len(ids), width)]
    return [window for window in windows if len(window) > 1]


def window_width(context_length: int | None) -> int:
    """Tokens per window of the reference text."""
    return min(WINDOW, context_length or WINDOW)
