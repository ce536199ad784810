"""Where the tokens of a text come from: a string, ids, a file, or an iterator of chunks."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from steerlab.core.engine import Engine
from steerlab.core.errors import PromptError
from steerlab.core.text import PromptLike, as_prompts, encode_prompt
from steerlab.scoring import pieces

TextLike: TypeAlias = PromptLike | Path | Iterator[str]
"""A text (or its ids), a file of text, or an iterator over a text in chunks."""


@dataclass
class Source:
    """The tokens of one text, piece after piece, read once.

    Attributes:
        pieces: the ids of each piece.
        n_tokens: how many there are, if that is known before the end.
        identity: hash of the text, if it can be known before it is read.
    """

    pieces: Iterator[tuple[int, ...]]
    n_tokens: int | None
    identity: str | None


def open_source(engine: Engine, text: TextLike) -> Source:
    """The tokens of a text.

    Raises:
        PromptError: if there is no text, or several.
        DataError: for a file that cannot be read.
    """
    if isinstance(text, Path):
        return _streamed(engine, pieces.read_chunks(text), text_hash(pieces.read_chunks(text)))
    if isinstance(text, Iterator):
        return _streamed(engine, text, None)
    if isinstance(text, str) and not text:
        raise PromptError(_EMPTY)
    texts = as_prompts(text)
    if len(texts) > 1:
        raise PromptError(f"One text is scored at a time, got {len(texts)}; call once per text.")
    ids = encode_prompt(engine.tokenizer, texts[0], d_vocab=engine.info.d_vocab).token_ids
    return Source(iter([ids]), len(ids), text_hash([text]) if isinstance(text, str) else ids_hash(ids))


def count_tokens(engine: Engine, text: Path) -> int:
    """How many tokens a file of text has; nothing of it is kept."""
    return sum(map(len, _streamed(engine, pieces.read_chunks(text), None).pieces))


def _streamed(engine: Engine, chunks: Iterable[str], identity: str | None) -> Source:
    chunks = (chunk for chunk in chunks if chunk)
    first = next(chunks, None)
    if first is None:
        raise PromptError(_EMPTY)
    found = pieces.tokenised_pieces(
        engine.tokenizer, itertools.chain([first], chunks), d_vocab=engine.info.d_vocab, piece_chars=pieces.PIECE_CHARS
    )
    start = list(itertools.islice(found, 2))
    n_tokens = len(start[0]) if len(start) == 1 else None
    return Source(itertools.chain(start, found), n_tokens, identity)


def text_hash(chunks: Iterable[str]) -> str:
    """SHA-256 of a text in UTF-8, however it is cut."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def ids_hash(ids: Sequence[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(b"ids" + np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


def spelled_bytes(tokenizer: Any, ids: Sequence[int]) -> int:
    """UTF-8 bytes of the whole characters that these ids spell; special tokens spell none."""
    spelled = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(spelled.replace("\ufffd", "").encode("utf-8"))


_EMPTY = "The text is empty; there is nothing to score."
