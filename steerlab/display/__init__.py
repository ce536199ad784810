"""What a notebook shows of results: plain HTML without network or scripts, safe against markup in texts.

Nothing here knows a model, a plan or a result; those say what to show of them in these words.
"""

from steerlab.display.colors import Legend, Scale, diverging, sequential
from steerlab.display.differences import SideBySide, TextRow, side_by_side
from steerlab.display.grid import Grid, visible
from steerlab.display.histogram import Histogram
from steerlab.display.html import (
    STYLE,
    Face,
    Facts,
    Fold,
    Numeral,
    Picture,
    Piece,
    Remarks,
    Shown,
    Table,
    count,
    escaped,
    figure,
    interval,
    shortened,
)
from steerlab.display.tokens import TokenRow, TokenView, tokens

__all__ = [
    "STYLE",
    "Face",
    "Facts",
    "Fold",
    "Grid",
    "Histogram",
    "Legend",
    "Numeral",
    "Picture",
    "Piece",
    "Remarks",
    "Scale",
    "Shown",
    "SideBySide",
    "Table",
    "TextRow",
    "TokenRow",
    "TokenView",
    "count",
    "diverging",
    "escaped",
    "figure",
    "interval",
    "sequential",
    "shortened",
    "side_by_side",
    "tokens",
    "visible",
]
