"""Checks that a frame holds what a plot needs."""

from collections.abc import Sequence

import pandas as pd

from steerlab.core.errors import DataError


def need_columns(frame: pd.DataFrame, columns: Sequence[str], plot: str) -> None:
    """Refuses a frame without rows or without one of the columns.

    Raises:
        DataError: naming the columns that are missing and those that are there.
    """
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise DataError(
            f"{plot} needs the columns {', '.join(columns)}; missing: {', '.join(missing)}. "
            f"The frame has {', '.join(map(str, frame.columns))}."
        )
    if frame.empty:
        raise DataError(f"{plot} got a frame without rows.")
