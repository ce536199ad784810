"""Tables from frames: readable headings and numbers, intervals in one cell, and a note of what is cut."""

import math
from numbers import Integral, Real
from typing import Any, Final

import pandas as pd

from steerlab.experiment.blocks import Table
from steerlab.experiment.wording import number

MAX_ROWS: Final = 60
MISSING: Final = "–"
NAMES: Final = {
    "ppl_ratio": "perplexity ratio",
    "nll": "nll per token (nats)",
    "num_tokens": "tokens",
    "num_texts": "texts",
    "positive_log_prob": "log p of positives (nats)",
    "negative_log_prob": "log p of negatives (nats)",
    "log_prob_margin": "log-prob margin (nats)",
    "choice_prob": "p of the positive targets",
    "mean_size": "mean size of slope",
    "largest_size": "largest size of slope",
}


def table_of(frame: pd.DataFrame, caption: str, *, place: str = "", max_rows: int = MAX_ROWS) -> Table:
    """A frame as a table.

    A figure with columns `x`, `x_low` and `x_high` (or `mean`, `low`, `high`) becomes one column, `value [low, high]`.

    Args:
        frame: what to show, in its own order.
        caption: what it shows.
        place: file that holds all rows, named where the table is cut.
        max_rows: rows shown at most.
    """
    shown: Any = _with_intervals(frame.head(max_rows))
    rows = [tuple(cell(value) for value in row) for row in shown.itertuples(index=False)]
    worded = frozenset(k for k, name in enumerate(shown.columns) if _holds_words(frame[name]))
    columns = [heading(str(column)) for column in shown.columns]
    return Table(caption, columns, rows, cut_note(frame, max_rows, place), worded)


def cut_note(frame: pd.DataFrame, max_rows: int, place: str) -> str:
    """What a table leaves out, in words; empty if nothing."""
    if len(frame) <= max_rows:
        return ""
    where = f"; all in {place}" if place else "; all in the frame of this result"
    return f"{max_rows} of {count(len(frame))} rows{where}."


def count(value: int) -> str:
    """A whole number with its thousands apart.

    Examples:
        >>> count(10000)
        '10\u202f000'
    """
    return f"{value:,}".replace(",", "\u202f") if value >= 10_000 else str(value)


def heading(column: str) -> str:
    """A column's name for a reader."""
    return NAMES.get(column, column.replace("_", " "))


def cell(value: Any) -> str:
    """A value for a reader: four significant digits, a true minus, a dash for what is missing.

    Examples:
        >>> cell(-0.123456), cell(float("nan")), cell(True), cell(12)
        ('−0.1235', '–', 'yes', '12')
    """
    if value is None or value is pd.NA or (isinstance(value, Real) and math.isnan(value)):
        return MISSING
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return number(int(value), "d")
    if isinstance(value, Real):
        return number(value, ".4g") if math.isfinite(value) else number(value).replace("inf", "∞")
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    return str(value)


def _holds_words(column: Any) -> bool:
    return pd.api.types.is_string_dtype(column) and not pd.api.types.is_numeric_dtype(column)


def _with_intervals(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with each figure and its two ends in one column of text."""
    merged = frame.copy()
    for column in frame.columns:
        low, high = ("low", "high") if column == "mean" else (f"{column}_low", f"{column}_high")
        if low in frame.columns and high in frame.columns:
            triples = zip(frame[column], frame[low], frame[high], strict=True)
            merged[column] = pd.Series([_interval(*triple) for triple in triples], index=frame.index, dtype=object)
            merged = merged.drop(columns=[low, high])
    return merged


def _interval(value: float, low: float, high: float) -> str:
    if math.isnan(low) or math.isnan(high):
        return cell(float(value))
    return f"{cell(float(value))} [{cell(float(low))}, {cell(float(high))}]"
