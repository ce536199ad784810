"""Pieces of HTML: a face with a headline, tables, and parts that open on demand.

Colours of text and page are the notebook's own, so that light and dark themes both work; only what must be coloured
brings its colours along.
"""

import base64
import html
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

STYLE: Final = (
    "<style>"
    ".sl-face{font:13px/1.45 system-ui,sans-serif;max-width:72rem}"
    ".sl-face p{margin:.2em 0}"
    ".sl-face .sl-title{font-weight:600;overflow-wrap:anywhere}"
    ".sl-face .sl-quiet{opacity:.8;overflow-wrap:anywhere}"
    ".sl-face .sl-scroll{overflow-x:auto}"
    ".sl-face table{border-collapse:collapse;margin:.4em 0;font:inherit;font-variant-numeric:tabular-nums;border:0}"
    ".sl-face caption{text-align:left;padding:.15em 0;opacity:.8}"
    ".sl-face tr,.sl-face thead{background:none;border:0}"
    ".sl-face th,.sl-face td{padding:.15em .6em;text-align:left;vertical-align:top;background:none;border:0;"
    "border-bottom:1px solid color-mix(in srgb,currentColor 18%,transparent)}"
    ".sl-face th{font-weight:600}"
    ".sl-face .sl-number{text-align:right;white-space:nowrap}"
    ".sl-face .sl-text{white-space:pre-wrap;overflow-wrap:break-word;max-width:48em}"
    ".sl-face .sl-long{overflow-wrap:anywhere;min-width:14em}"
    ".sl-face summary{cursor:pointer}"
    ".sl-face .sl-tokens{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7;"
    "font-family:ui-monospace,monospace}"
    ".sl-face .sl-tokens i{font-style:normal;border-radius:2px;padding:.1em 0}"
    ".sl-face .sl-aligned span{display:inline-flex;flex-direction:column;vertical-align:top;margin:0 1px .4em 0}"
    ".sl-face .sl-aligned b{font-weight:600;padding-right:.6em}.sl-face .sl-aligned i{min-height:1.7em}"
    ".sl-face .sl-cells td,.sl-face .sl-cells th{padding:.1em .4em;white-space:pre;text-align:center;"
    "font-family:ui-monospace,monospace}"
    ".sl-face .sl-cells th{font-weight:400}.sl-face .sl-cells th[scope=row]{text-align:right}"
    ".sl-face .sl-cells td{border:1px solid color-mix(in srgb,currentColor 10%,transparent)}"
    ".sl-face .sl-bar{display:inline-block;width:9em;height:.8em;vertical-align:middle;border:1px solid currentColor}"
    ".sl-face mark{color:inherit;font-weight:600;text-decoration:underline;"
    "background:color-mix(in srgb,currentColor 14%,transparent)}"
    ".sl-face img,.sl-face svg{max-width:100%;height:auto}"
    ".sl-face img{background:#fff}"
    "@media print{.sl-face .sl-tokens i,.sl-face .sl-cells td,.sl-face .sl-bar{print-color-adjust:exact;"
    "-webkit-print-color-adjust:exact}.sl-face .sl-scroll{overflow:visible}"
    ".sl-face table{font-size:.85em}.sl-face .sl-long{min-width:0}.sl-face .sl-cells td{white-space:pre-wrap;"
    "overflow-wrap:anywhere}"
    ".sl-face details::details-content{content-visibility:visible;block-size:auto}}"
    "</style>"
)
"""What every face brings along, once a face."""


@runtime_checkable
class Piece(Protocol):
    """A part of a face."""

    def html(self) -> str:
        """Its HTML, without style."""
        ...


_LONG_TEXT: Final = 24  # characters that a narrow page may break a line in


class Numeral(str):
    """The text of a number, which stands right in a table."""

    __slots__ = ()


def escaped(text: Any) -> str:
    """Text with nothing in it that a browser would take for markup."""
    return html.escape(str(text), quote=True)


def figure(value: Any, digits: int = 3) -> str:
    """A number with a sensible number of digits, or the text of something else.

    Examples:
        >>> [figure(x) for x in (0.04762, 1234.5678, -2.0, 7, float("nan"), 1e-9, "ok", None)]
        ['0.0476', '1235', '−2.00', '7', '–', '1.00e−09', 'ok', '–']
    """
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ").replace("-", "−")
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    rounded = abs(float(f"{value:.{digits - 1}e}"))
    places = max(0, digits - 1 - math.floor(math.log10(rounded))) if value else digits - 1
    return f"{value:.{places}f}".replace("-", "−")


def count(number: int, word: str) -> str:
    """A number of things in words.

    Examples:
        >>> count(1, "prompt"), count(12, "token")
        ('1 prompt', '12 tokens')
    """
    return f"{figure(number)} {word}{'' if number == 1 else 's'}"


def interval(low: float, high: float) -> str:
    """An interval in brackets.

    Examples:
        >>> interval(-0.5, 1.25)
        '[−0.500, 1.25]'
    """
    return f"[{figure(low)}, {figure(high)}]"


def shortened(text: Any, width: int = 60) -> str:
    r"""The beginning of a text on one line, for a heading.

    Examples:
        >>> shortened("one\ntwo three", width=9)
        'one two …'
    """
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


@dataclass(frozen=True)
class Table:
    """A table; numbers stand right, texts keep their line breaks.

    Attributes:
        columns: headings.
        rows: cells, as numbers, text, or anything with a `str`.
        limit: rows that are shown; how many more there are is said below.
        more: what shows the others, e.g. `.to_frame()`.
        caption: what it shows; empty for none.
        total: how many rows there are, if `rows` holds the first of them only.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    limit: int = 50
    more: str = ""
    caption: str = ""
    total: int | None = None

    @classmethod
    def of_frame(cls, frame: Any, *, limit: int = 50, more: str = "", caption: str = "") -> "Table":
        """The first rows of a pandas frame; what is neither number nor text is written out."""
        rows = [tuple(map(_plain, row)) for row in frame.head(limit).itertuples(index=False)]
        return cls([str(name) for name in frame.columns], rows, limit, more, caption, len(frame))

    def html(self) -> str:
        """Its HTML."""
        head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in self.columns)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows[: self.limit])
        caption = f"<caption>{escaped(self.caption)}</caption>" if self.caption else ""
        return _scrolling(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>") + self._rest()

    def _rest(self) -> str:
        left = (len(self.rows) if self.total is None else self.total) - min(len(self.rows), self.limit)
        rest = f"; {escaped(self.more)} has all" if self.more else ""
        return f'<p class="sl-quiet">… and {left} more{rest}</p>' if left > 0 else ""


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for; what is None is left out."""

    entries: Sequence[tuple[str, Any]]

    def html(self) -> str:
        """Its HTML."""
        known = [(name, value) for name, value in self.entries if value is not None]
        rows = "".join(
            f'<tr><th scope="row">{escaped(name)}</th>{_cell(figure(_plain(value)))}</tr>' for name, value in known
        )
        return _scrolling(f"<table><tbody>{rows}</tbody></table>") if known else ""


@dataclass(frozen=True)
class Remarks:
    """Short sentences, a line each."""

    sentences: Sequence[str]

    def html(self) -> str:
        """Its HTML."""
        return "".join(f'<p class="sl-quiet">{escaped(sentence)}</p>' for sentence in self.sentences)


@dataclass(frozen=True)
class Picture:
    """A picture inside the page.

    Attributes:
        svg: the picture.
        alt: its finding in words.
    """

    svg: bytes
    alt: str

    def html(self) -> str:
        """Its HTML."""
        data = base64.b64encode(self.svg).decode()
        return f'<p><img alt="{escaped(self.alt)}" src="data:image/svg+xml;base64,{data}"></p>'


@dataclass(frozen=True)
class Fold:
    """Pieces that a reader opens on demand; they are open in print."""

    title: str
    pieces: Sequence[Piece]

    def html(self) -> str:
        """Its HTML."""
        return f"<details><summary>{escaped(self.title)}</summary>{''.join(p.html() for p in self.pieces)}</details>"


@dataclass(frozen=True)
class Face:
    """What a notebook shows of a result.

    Attributes:
        title: the finding in one line.
        pieces: tables, token texts, folds.
        remarks: short sentences under the title.
    """

    title: str
    pieces: Sequence[Piece] = ()
    remarks: Sequence[str] = field(default=())

    def html(self) -> str:
        """Its HTML, style included."""
        body = "".join(piece.html() for piece in self.pieces)
        title = f'<p class="sl-title">{escaped(self.title)}</p>{Remarks(self.remarks).html()}'
        return f'{STYLE}<div class="sl-face">{title}{body}</div>'


class Shown(ABC):
    """A result that says what it found: in one line where it is printed, with its parts in a notebook."""

    __slots__ = ()

    @abstractmethod
    def _finding(self) -> str:
        """The finding in one line, without the name of the class."""

    @abstractmethod
    def _pieces(self) -> Sequence[Piece]:
        """What a notebook shows below that line."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' '.join(self._finding().split())})"

    def _repr_html_(self) -> str:
        return Face(repr(self), self._pieces()).html()


def _scrolling(table: str) -> str:
    """A table that scrolls by itself where the page is narrow, by keyboard too."""
    return f'<div class="sl-scroll" tabindex="0">{table}</div>'


def _plain(value: Any) -> Any:
    """A value that a cell can show: numbers as they are, anything else as text."""
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if value is None or isinstance(value, str | int | float):
        return value
    return ", ".join(map(figure, value)) if isinstance(value, list | tuple | frozenset) else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, str) and not isinstance(value, Numeral):
        long = " sl-long" if len(value) > _LONG_TEXT else ""
        return f'<td class="sl-text{long}">{escaped(value)}</td>'
    return f'<td class="sl-number">{escaped(figure(value))}</td>'
