"""Where the tokens of a text come from: a string, ids, a file, or an iterator of chunks."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from steerlab.core._characters import check_whole
from steerlab.core._files import read_chunks, warn_of_file_name
from steerlab.core._text import PromptLike, as_prompts, encode_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import PromptError
from steerlab.scoring import _pieces as pieces

TextLike: TypeAlias = PromptLike | Path | Iterator[str]
"""A text (or its ids), a file of text, or an iterator over a text in chunks."""


_HEAD = 1 << 12


@dataclass
class Source:
    """The tokens of one text, piece after piece, read once.

    Attributes:
        pieces: the ids of each piece.
        n_tokens: how many there are, if that is known before the end.
        identity: hash of the text, if it can be known before it is read.
        text: the text that the pieces are read from; None for token ids and chats.
    """

    pieces: Iterator[tuple[int, ...]]
    n_tokens: int | None
    identity: str | None
    text: "CountedText | None" = None


class CountedText:
    """A text in chunks, and how much of it has been read.

    Attributes:
        head: its beginning.
        num_bytes: UTF-8 bytes read so far.

    Args:
        chunks: the text, cut anywhere.
    """

    def __init__(self, chunks: Iterable[str]) -> None:
        self._chunks = iter(chunks)
        self.head, self.num_bytes = "", 0

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks:
            if not isinstance(chunk, str):
                raise PromptError(f"A text in chunks consists of strings, got {type(chunk).__name__}.")
            check_whole(chunk, "The text", PromptError)
            self.head += chunk[: max(0, _HEAD - len(self.head))]
            self.num_bytes += len(chunk.encode("utf-8"))
            if chunk:
                yield chunk


def open_source(engine: Engine, text: TextLike) -> Source:
    """The tokens of a text.

    Raises:
        PromptError: if there is no text, or several.
        DataError: for a file that cannot be read.
    """
    if isinstance(text, Path):
        return _streamed(engine, read_chunks(text), text_hash(read_chunks(text)))
    if isinstance(text, Iterator):
        return _streamed(engine, text, None)
    if isinstance(text, str) and not text:
        raise PromptError(_EMPTY)
    warn_of_file_name(text, "a path, pathlib.Path({name})")
    texts = as_prompts(text)
    if len(texts) > 1:
        raise PromptError(f"One text is scored at a time, got {len(texts)}; call once per text.")
    ids = encode_prompt(engine.tokenizer, texts[0], d_vocab=engine.info.d_vocab).token_ids
    if not isinstance(text, str):
        return Source(iter([ids]), len(ids), ids_hash(ids))
    counted = CountedText([text])
    list(counted)
    return Source(iter([ids]), len(ids), text_hash([text]), counted)


def count_tokens(engine: Engine, text: Path) -> int:
    """How many tokens a file of text has; nothing of it is kept."""
    return sum(map(len, _streamed(engine, read_chunks(text), None).pieces))


def _streamed(engine: Engine, chunks: Iterable[str], identity: str | None) -> Source:
    text = CountedText(chunks)
    rest = iter(text)
    first = next(rest, None)
    if first is None:
        raise PromptError(_EMPTY)
    found = pieces.tokenised_pieces(
        engine.tokenizer, itertools.chain([first], rest), d_vocab=engine.info.d_vocab, piece_chars=pieces.PIECE_CHARS
    )
    start = list(itertools.islice(found, 2))
    n_tokens = len(start[0]) if len(start) == 1 else None
    return Source(itertools.chain(start, found), n_tokens, identity, text)


def text_hash(chunks: Iterable[str]) -> str:
    """SHA-256 of a text in UTF-8, however it is cut."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def ids_hash(ids: Sequence[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(b"ids" + np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


_EMPTY = "The text is empty; there is nothing to score."
