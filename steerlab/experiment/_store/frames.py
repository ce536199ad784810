"""Frames as files of a run."""

import io
from pathlib import Path

import pandas as pd

from steerlab.core.errors import RunError
from steerlab.experiment._store.run_folder import RunFolder, read_bytes


def write_frame(folder: RunFolder, place: str, frame: pd.DataFrame) -> None:
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
