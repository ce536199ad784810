"""Frames and JSON as files of a run."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core.errors import RunError
from steerlab.experiment._store.run_folder import RunFolder, read_bytes


def json_text(data: Any) -> str:
    """JSON with NaN and infinities as null."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_frame(folder: RunFolder, place: str, frame: pd.DataFrame) -> None:
    """Writes a frame as Parquet."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    folder.write(place, buffer.getvalue())


def read_frame(path: Path) -> pd.DataFrame:
    """Reads a Parquet file of a run.

    Raises:
        RunError: if it is missing or damaged.
    """
    data = read_bytes(path)
    try:
        return pd.read_parquet(io.BytesIO(data))
    except Exception as error:  # whatever the reader makes of damaged bytes
        raise RunError(f"{path} cannot be read: {error}.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
