"""Pieces of HTML: a face with a headline, tables, and parts that open on demand.

Colours of text and page are the notebook's own, so that light and dark themes both work; only what must be coloured
brings its colours along.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_STYLE = (
    "<style>"
    ".sl-face{font:13px/1.45 system-ui,sans-serif;max-width:72rem}"
    ".sl-face h4{font-size:1em;font-weight:600;margin:.2em 0}"
    ".sl-face p{margin:.2em 0}"
    ".sl-face .sl-quiet{opacity:.75}"
    ".sl-face .sl-scroll{overflow-x:auto}"
    ".sl-face table{border-collapse:collapse;margin:.4em 0;font-variant-numeric:tabular-nums}"
    ".sl-face th,.sl-face td{padding:.15em .6em;text-align:left;vertical-align:top;background:none;"
    "border-bottom:1px solid color-mix(in srgb,currentColor 18%,transparent)}"
    ".sl-face th{font-weight:600}"
    ".sl-face .sl-number{text-align:right;white-space:nowrap}"
    ".sl-face .sl-text{white-space:pre-wrap;overflow-wrap:anywhere;max-width:48em}"
    ".sl-face summary{cursor:pointer}"
    ".sl-face .sl-tokens{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7;"
    "font-family:ui-monospace,monospace}"
    ".sl-face .sl-tokens i{font-style:normal;border-radius:2px;padding:.1em 0}"
    ".sl-face .sl-bar{display:inline-block;width:9em;height:.8em;vertical-align:middle;border:1px solid currentColor}"
    "@media print{.sl-face .sl-tokens i,.sl-face .sl-bar{print-color-adjust:exact;-webkit-print-color-adjust:exact}}"
    "</style>"
)


class Piece(Protocol):
    """A part of a face."""

    def html(self) -> str:
        """Its HTML, without style."""
        ...


def escaped(text: Any) -> str:
    """Text with nothing in it that a browser would take for markup."""
    return html.escape(str(text), quote=True)


def figure(value: Any, digits: int = 3) -> str:
    """A number with a sensible number of digits, or the text of something else.

    Examples:
        >>> [figure(x) for x in (0.04762, 1234.5678, -2.0, 7, float("nan"), 1e-9, "ok", None)]
        ['0.0476', '1235', '−2.00', '7', '–', '1.00e−09', 'ok', '–']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ").replace("-", "−")
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else digits - 1
    return f"{value:.{places}f}".replace("-", "−")


@dataclass(frozen=True)
class Table:
    """A table; numbers stand right, texts keep their line breaks.

    Attributes:
        columns: headings.
        rows: cells, as numbers, text, or anything with a `str`.
        limit: rows that are shown; how many more there are is said below.
        more: what shows the others, e.g. `.to_frame()`.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    limit: int = 50
    more: str = ""

    def html(self) -> str:
        """Its HTML."""
        head = "".join(f"<th>{escaped(name)}</th>" for name in self.columns)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows[: self.limit])
        left = len(self.rows) - self.limit
        rest = f"; {escaped(self.more)} has all" if self.more else ""
        note = f'<p class="sl-quiet">… and {left} more{rest}</p>' if left > 0 else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="sl-scroll">{table}</div>{note}'


@dataclass(frozen=True)
class Fold:
    """Pieces that a reader opens on demand."""

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
        remarks = "".join(f'<p class="sl-quiet">{escaped(remark)}</p>' for remark in self.remarks)
        body = "".join(piece.html() for piece in self.pieces)
        return f'{_STYLE}<div class="sl-face"><h4>{escaped(self.title)}</h4>{remarks}{body}</div>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f'<td class="sl-text">{escaped(value)}</td>'
    return f'<td class="sl-number">{escaped(figure(value))}</td>'
