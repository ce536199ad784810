"""The text that token ids decode to after other ids, and the ids that a text encodes to there.

Some tokenizers put a space before a text and take it off again when they decode, so that ids decoded alone lose the
space that they have after other text, and a text encoded alone gains one.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from steerlab.core.errors import TargetError

CONTEXT_TAIL = 8  # tokens before others that can change how those are spelled, with room to spare
_PARTS = 3  # tokens that can hold the beginning of one character
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a character decodes to that ids begin only
_ANCHORS = ("a", "1", ".", "\n", ")", "x")  # texts to encode another text after


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of ids alone, special tokens left out, spaces as they are."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Continuation:
    """Decodes ids after a context, special tokens left out.

    A character that begins in the context and ends after it counts as the continuation's.

    Args:
        tokenizer: the model's own tokenizer.
        context_ids: the ids before.
    """

    def __init__(self, tokenizer: Any, context_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        self._tail = list(islice((i for i in reversed(context_ids) if i not in special), CONTEXT_TAIL))[::-1]
        whole = decode(tokenizer, self._tail)
        cut = [decode(tokenizer, self._tail[:-k]) for k in range(1, 1 + _PARTS)] if whole.endswith(INCOMPLETE) else []
        self._before = sorted({whole, whole.rstrip(INCOMPLETE), *cut}, key=len, reverse=True)

    def text(self, ids: Sequence[int]) -> str:
        """The text that these ids add to the context's."""
        whole = decode(self._tokenizer, [*self._tail, *ids])
        before = next((text for text in self._before if whole.startswith(text)), None)
        return decode(self._tokenizer, ids) if before is None else whole[len(before) :]


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of one token as it stands inside a text, a space at its start included; special tokens by their name."""

    def spelled(*ids: int) -> str:
        return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    alone, twice = spelled(token_id), spelled(token_id, token_id)
    return twice[len(alone) :] if twice.startswith(alone) else alone


def spelled_bytes(tokenizer: Any, context_ids: Sequence[int], ids: Sequence[int]) -> int:
    """UTF-8 bytes of the text that ids spell after a context; special tokens spell none.

    A character that begins in the context and ends in the ids counts whole; one that they leave unfinished does not
    count.
    """
    return len(Continuation(tokenizer, context_ids).text(ids).replace(INCOMPLETE, "").encode("utf-8"))


def ids_after(tokenizer: Any, context_ids: Sequence[int], text: str) -> tuple[int, ...]:
    """Ids that spell a text after a context: its own where the tokenizer adds and drops no space before it.

    Raises:
        TargetError: if the tokenizer cannot spell it there.
    """
    after = Continuation(tokenizer, context_ids)
    near: tuple[int, ...] | None = None
    for ids in _encodings(tokenizer, text):
        spelled = after.text(ids)
        if not ids or _blanks(spelled) == _blanks(text):
            return ids
        if near is None and bool(_blanks(spelled)) == bool(_blanks(text)):
            near = ids
    if near is None:
        alone = plain_ids(tokenizer, text)
        raise TargetError(
            f"The tokenizer cannot spell the target {text!r} right after other tokens: its ids {list(alone)} read "
            f"{after.text(alone)!r} there. Pass the target's token ids, or prompt and target as text with "
            "boundary='joint'."
        )
    return near


def plain_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of a text without special tokens around it."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encodings(tokenizer: Any, text: str) -> Iterator[tuple[int, ...]]:
    """The text's ids alone, then as they stand after other texts."""
    yield plain_ids(tokenizer, text)
    for anchor in _ANCHORS:
        head, joint = plain_ids(tokenizer, anchor), plain_ids(tokenizer, anchor + text)
        if len(joint) > len(head) and joint[: len(head)] == head:
            yield joint[len(head) :]


def _blanks(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
