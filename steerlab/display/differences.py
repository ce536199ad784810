"""Texts side by side, with what differs from the first of each row marked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

from steerlab.display.html import Piece, Shown, count, escaped

_WORDS: Final = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
_LONGEST: Final = 4000  # words of two texts that are compared; longer ones are marked whole


@dataclass(frozen=True)
class TextRow:
    """Texts that belong together.

    Attributes:
        name: what they share, e.g. the prompt and the sample's number.
        texts: one per column.
    """

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class SideBySide(Shown):
    """Texts in columns; words that the first column lacks are marked in the others.

    Attributes:
        columns: a heading per column.
        rows: the texts.
        names: the heading over the rows' names.
        limit: rows that a notebook shows; how many more there are is said below.
    """

    columns: tuple[str, ...]
    rows: tuple[TextRow, ...]
    names: str = ""
    limit: int = 50

    @property
    def n_same(self) -> int:
        """Rows whose texts are all equal."""
        return sum(len(set(row.texts)) == 1 for row in self.rows)

    def _finding(self) -> str:
        return f"{' | '.join(self.columns)}: {count(len(self.rows), 'row')}, {self.n_same} of them the same"

    def _pieces(self) -> Sequence[Piece]:
        return [self]

    def html(self) -> str:
        """The table without style, as a piece of a face."""
        head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in (self.names, *self.columns))
        body = "".join(map(_row, self.rows[: self.limit]))
        left = len(self.rows) - self.limit
        note = f'<p class="sl-quiet">… and {left} more</p>' if left > 0 else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="sl-scroll" tabindex="0">{table}</div>{note}'


def side_by_side(columns: Sequence[str], rows: Sequence[TextRow], *, names: str = "") -> SideBySide:
    """Texts in columns, compared word by word with the first column.

    Args:
        columns: a heading per column.
        rows: names and texts, as many texts as columns.
        names: the heading over the rows' names.

    Raises:
        ValueError: if a row has another number of texts.

    Examples:
        >>> side_by_side(["before", "after"], [TextRow("x", ("a b", "a c"))])
        SideBySide(before | after: 1 row, 0 of them the same)
    """
    for row in rows:
        if len(row.texts) != len(columns):
            raise ValueError(f"Row {row.name!r} has {len(row.texts)} texts for {len(columns)} columns.")
    return SideBySide(tuple(columns), tuple(rows), names)


def marked(text: str, first: str) -> str:
    """A text as HTML in which the words that another lacks are marked.

    Examples:
        >>> marked("a cat <b>", "a dog")
        'a <mark>cat &lt;b&gt;</mark>'
    """
    words, others = _WORDS.findall(text), _WORDS.findall(first)
    if len(words) + len(others) > _LONGEST:
        return escaped(text) if text == first else f"<mark>{escaped(text)}</mark>"
    parts = []
    for kind, _, _, start, stop in SequenceMatcher(None, others, words, autojunk=False).get_opcodes():
        part = escaped("".join(words[start:stop]))
        parts.append(part if kind == "equal" or not part else f"<mark>{part}</mark>")
    return "".join(parts)


def _row(row: TextRow) -> str:
    first = row.texts[0] if row.texts else ""
    cells = [escaped(first), *(marked(text, first) for text in row.texts[1:])]
    texts = "".join(f'<td class="sl-text sl-long">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row" class="sl-text sl-long">{escaped(row.name)}</th>{texts}</tr>'
