"""What a notebook shows of findings, frames and plots: the report's blocks as pieces of a face."""

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes

from steerlab.display import Fold, Numeral, Picture, Piece, Remarks, Table
from steerlab.experiment._blocks.findings import LONG_TABLE, Finding
from steerlab.experiment._blocks.pictures import picture
from steerlab.experiment._blocks.tables import table_of

ROWS_SHOWN = 60


def finding_pieces(finding: Finding) -> list[Piece]:
    """A finding's sentences and table; long tables are folded."""
    if finding.frame is None or not len(finding.frame):
        return [Remarks(finding.sentences)]
    return [Remarks(finding.sentences), frame_piece(finding.frame, finding.caption)]


def frame_piece(frame: pd.DataFrame, caption: str, *, fold: bool | None = None) -> Piece:
    """A frame as a table, intervals in one cell each.

    Args:
        frame: what to show, in its own order.
        caption: what it shows.
        fold: whether it opens on demand; by default if it is long.
    """
    made = table_of(frame, caption, max_rows=ROWS_SHOWN)
    rows = [[text if k in made.worded else Numeral(text) for k, text in enumerate(row)] for row in made.rows]
    is_folded = len(frame) > LONG_TABLE if fold is None else fold
    shown = Table(made.columns, rows, ROWS_SHOWN, caption="" if is_folded else caption, total=len(frame))
    return Fold(caption, [shown]) if is_folded else shown


def plot_piece(name: str, draw: Callable[[], Axes], alt: str) -> Picture:
    """A plot as a picture, with its finding in words."""
    return Picture(picture(name, draw, alt, "").svg, alt)
