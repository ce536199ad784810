"""A grid of numbers with names at both sides, coloured: cosines, projections by token and layer, a lens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steerlab.display.colors import Legend, Scale
from steerlab.display.html import escaped, figure

MAX_CELLS = 2400
_SIGNS = {code: 0x2400 + code for code in range(32)} | {ord("\n"): "⏎", ord("\t"): "⇥", ord(" "): "·"}


@dataclass(frozen=True)
class Grid:
    """Numbers by row and column, exact on hover.

    Attributes:
        rows: a name per row.
        columns: a name per column.
        values: shape [rows, columns]; NaN has no colour.
        scale: the colours.
        unit: of the numbers; empty if they have none.
        texts: what stands in the cells, likewise; by default the numbers.
        corner: what the names of rows and columns are.
        more: what shows the rows that are left out, e.g. `.to_frame()`.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    scale: Scale
    unit: str = ""
    texts: Sequence[Sequence[str]] | None = None
    corner: str = ""
    more: str = ""

    def html(self) -> str:
        """Its HTML: a legend and the rows that fit into `MAX_CELLS`."""
        fitting = max(1, MAX_CELLS // max(1, len(self.columns)))
        head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in ("", *self.columns))
        head = head.replace("<th", f'<th title="{escaped(self.corner)}"', 1) if self.corner else head
        body = "".join(map(self._row, range(min(len(self.rows), fitting))))
        left = len(self.rows) - fitting
        rest = f"; {escaped(self.more)} has all" if self.more else ""
        note = f'<p class="sl-quiet">… and {left} more rows{rest}</p>' if left > 0 else ""
        table = f'<table class="sl-cells"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f'{Legend(self.scale, self.unit).html()}<div class="sl-scroll" tabindex="0">{table}</div>{note}'

    def _row(self, row: int) -> str:
        cells = "".join(map(self._cell, self.values[row].tolist(), self._texts(row)))
        return f'<tr><th scope="row">{escaped(self.rows[row])}</th>{cells}</tr>'

    def _texts(self, row: int) -> Sequence[str]:
        return [figure(value, 2) for value in self.values[row].tolist()] if self.texts is None else self.texts[row]

    def _cell(self, value: float, text: str) -> str:
        if math.isnan(value):
            return f"<td>{escaped(text)}</td>"
        told = escaped(f"{figure(value, 4)} {self.unit}".strip())
        return f'<td style="{self.scale.css(value)}" title="{told}">{escaped(text)}</td>'


def visible(token: str) -> str:
    r"""A token on one line, with its white space as signs.

    Examples:
        >>> visible(" a\n")
        '·a⏎'
    """
    return token.translate(_SIGNS) or "∅"
