"""Texts longer than memory: read in chunks, and tokenised in pieces that give the tokens of the whole.

A piece ends only where the tokens on both sides are the same with the cut and without it, which is checked on the text
around every cut. That is proof for tokenizers that look a bounded stretch around a place: those that split text into
words first, and byte-pair encodings in general, where an encoding is valid if and only if each two neighbouring tokens
are. Other tokenizers are refused.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from steerlab.core._spelling import plain_ids
from steerlab.core._text import encode_prompt
from steerlab.core.errors import PromptError

PIECE_CHARS = 1 << 20  # texts up to this length are tokenised in one go
LOOKAHEAD_CHARS = 1 << 12
_TRIES = 4
_GROWTH = 4  # how many times longer than requested a piece may become in search of a place to cut

# ASCII on both sides, so that no Unicode normalisation reaches across; best after a line end, else before a space.
_LINE_STARTS = re.compile(r"(?<=\n)(?=[A-Za-z0-9])")
_WORD_ENDS = re.compile(r"(?<=[a-z])(?= [A-Za-z])")
_SPLITTING_WORDS = {"Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "ByteLevel", "Split"}


def tokenised_pieces(
    tokenizer: Any, chunks: Iterable[str], *, d_vocab: int, piece_chars: int = PIECE_CHARS
) -> Iterator[tuple[int, ...]]:
    """Token ids of a text that comes in chunks; joined, they are the ids of the whole text.

    Args:
        tokenizer: the model's own tokenizer.
        chunks: the text, cut anywhere.
        d_vocab: number of logits.
        piece_chars: characters that are tokenised at once; a text no longer than that is never cut.

    Yields:
        The ids of one piece; the first has the BOS where the tokenizer adds one.

    Raises:
        PromptError: for a text too long for one piece if the tokenizer, or the text, allows no safe cut.
    """
    source, held, first, wanted = iter(chunks), "", True, piece_chars
    while True:
        held, ended = _filled(source, held, wanted + min(LOOKAHEAD_CHARS, piece_chars))
        cut = len(held) if ended else safe_cut(tokenizer, held, wanted)
        if cut is None:
            wanted = _longer(wanted, piece_chars)
            continue
        yield (
            encode_prompt(tokenizer, held[:cut], d_vocab=d_vocab).token_ids
            if first
            else plain_ids(tokenizer, held[:cut])
        )
        if ended:
            return
        held, first, wanted = held[cut:], False, piece_chars


def _filled(source: Iterator[str], held: str, length: int) -> tuple[str, bool]:
    """The buffered text, filled up to a length, and whether the source has ended."""
    parts, size = [held], len(held)
    while size <= length:
        chunk = next(source, None)
        if chunk is None:
            return "".join(parts), True
        parts.append(chunk)
        size += len(chunk)
    return "".join(parts), False


def _longer(wanted: int, piece_chars: int) -> int:
    if wanted >= _GROWTH * piece_chars:
        raise PromptError(
            f"In {wanted} characters of the text there is no place where it can be cut without changing its tokens; "
            "pass the whole text as a string, or its token ids."
        )
    return 2 * wanted


def safe_cut(tokenizer: Any, text: str, at_most: int) -> int | None:
    """A place up to `at_most` where cutting the text changes no token; None if none of the likely ones is.

    Raises:
        PromptError: for a tokenizer whose tokens may depend on text arbitrarily far away.
    """
    check_local(tokenizer)
    whole = plain_ids(tokenizer, text)
    for cut in _candidates(text, at_most):
        if plain_ids(tokenizer, text[:cut]) + plain_ids(tokenizer, text[cut:]) == whole:
            return cut
    return None


def _candidates(text: str, at_most: int) -> Iterator[int]:
    """Likely places, later ones first."""
    for pattern in (_LINE_STARTS, _WORD_ENDS):
        start = max(0, at_most - LOOKAHEAD_CHARS)
        found = [match.start() for match in pattern.finditer(text, start, at_most) if match.start() > 0]
        yield from islice(reversed(found), _TRIES)


def check_local(tokenizer: Any) -> None:
    """Checks that a tokenizer's tokens depend on a bounded stretch of text around them.

    Raises:
        PromptError: otherwise, or if that cannot be known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise PromptError(f"{_TOO_LONG} this one is not a fast tokenizer, so it cannot be known. {_INSTEAD}")
    spec = json.loads(backend.to_str())
    kind = spec["model"].get("type")
    by_words = bool(_pre_tokenizers(spec.get("pre_tokenizer")) & _SPLITTING_WORDS)
    if kind == "BPE" and not spec["model"].get("dropout"):
        return
    if kind in ("Unigram", "WordPiece", "WordLevel") and by_words:
        return
    raise PromptError(f"{_TOO_LONG} this one ({kind} without a split into words) gives no such guarantee. {_INSTEAD}")


def _pre_tokenizers(spec: Any) -> set[str]:
    if spec is None:
        return set()
    if spec["type"] == "Sequence":
        return {name for part in spec["pretokenizers"] for name in _pre_tokenizers(part)}
    return {spec["type"]}


_TOO_LONG = (
    f"A text of more than {PIECE_CHARS} characters is tokenised in pieces, for which a tokenizer must look only a "
    "short way around each token;"
)
_INSTEAD = "Pass the whole text as a string, or its token ids."
