"""Tables from frames: readable headings and numbers, intervals in one cell, and a note of what is cut."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from statistics import median
from typing import Any, Final

import pandas as pd

from steerlab.experiment._blocks import Table
from steerlab.experiment._wording import number

MAX_ROWS: Final = 60
MISSING: Final = "–"
_MOST: Final = 3
"""Decimals at most."""

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
    shown: Any = _as_text(frame.head(max_rows))
    rows = [tuple(row) for row in shown.itertuples(index=False)]
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


def cell(value: Any, places: int | None = None) -> str:
    """A value for a reader: three significant digits, at most three decimals, a true minus, a dash for what is missing.

    Args:
        value: a number, text, or a list of them.
        places: decimals of a number, e.g. as the rest of its column has; by default its own.

    Examples:
        >>> cell(-0.123456), cell(0.047619), cell(1.5, 2), cell(float("nan")), cell(True), cell(12)
        ('−0.123', '0.048', '1.50', '–', 'yes', '12')
    """
    if value is None or value is pd.NA or (isinstance(value, Real) and math.isnan(value)):
        return MISSING
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return number(int(value), "d")
    if isinstance(value, Real):
        return _figure(float(value), decimals([value]) if places is None else places)
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    return str(value)


def decimals(values: Iterable[Any]) -> int:
    """Decimals that show a column's typical value with three significant digits, as far as it has them; at most three.

    Examples:
        >>> decimals([-1.1923, 0.879, 2.3456]), decimals([44.3111, 40.2]), decimals([0.05, 0.1]), decimals([8.58e-06])
        (2, 1, 2, 3)
    """
    known = [abs(float(value)) for value in values if isinstance(value, Real) and math.isfinite(value) and value]
    if not known:
        return 0
    needed = max(len(f"{value:.6f}".rstrip("0").partition(".")[2]) for value in known)
    return min(needed, max(0, 2 - math.floor(math.log10(median(known)))), _MOST)


def _figure(value: float, places: int) -> str:
    if not math.isfinite(value):
        return number(value).replace("inf", "∞")
    if value and not round(value, places):
        return number(value, ".2g")
    text = count(round(value)) if places == 0 else number(value, f".{places}f")
    return text.replace("-", "−") if value else "0"


def _holds_words(column: Any) -> bool:
    return pd.api.types.is_string_dtype(column) and not pd.api.types.is_numeric_dtype(column)


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame's cells as text, each figure and its two ends in one."""
    made, ends = {}, set()
    for column in frame.columns:
        low, high = ("low", "high") if column == "mean" else (f"{column}_low", f"{column}_high")
        has_ends = low in frame.columns and high in frame.columns
        places = decimals(value for name in [column, *([low, high] if has_ends else [])] for value in frame[name])
        made[column] = [cell(value, places) for value in frame[column]]
        if has_ends:
            ends |= {low, high}
            triples = zip(made[column], frame[low], frame[high], strict=True)
            made[column] = [_interval(*triple, places) for triple in triples]
    return pd.DataFrame({column: texts for column, texts in made.items() if column not in ends}, dtype=object)


def _interval(value: str, low: float, high: float, places: int) -> str:
    if math.isnan(low) or math.isnan(high):
        return value
    return f"{value} [{cell(float(low), places)}, {cell(float(high), places)}]"
