"""Run directories: what an experiment writes and reads back. Every file is written atomically.

::

    run.json              name, model, engine, seed, library versions, and the list of effects
    effects/000/          effect.json, plan.json, rows.parquet, cost.parquet
    frames/               cost-000.parquet, entropy-000.parquet, generations-000.parquet, …
    vectors/000.safetensors
    report.html
"""

import io
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core.errors import RunError
from steerlab.core.files import write_atomic
from steerlab.experiment.effect import Effect, EffectSettings

RUN_FILE = "run.json"
FORMAT = 1


def clear(path: Path) -> None:
    """Removes what a run wrote to its directory; nothing else there is touched."""
    (path / RUN_FILE).unlink()  # first, so that a half-cleared directory is not taken for a run
    for folder in ("effects", "frames", "vectors"):
        shutil.rmtree(path / folder, ignore_errors=True)
    (path / "report.html").unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Writes JSON with NaN as null."""
    write_atomic(path, json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file of a run.

    Raises:
        RunError: if it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Writes a frame as Parquet."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    write_atomic(path, buffer.getvalue())


def read_frame(path: Path) -> pd.DataFrame:
    """Reads a Parquet file of a run.

    Raises:
        RunError: if it is missing or damaged.
    """
    try:
        return pd.read_parquet(path)
    except Exception as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


def write_effect(folder: Path, effect: Effect, plan_json: str) -> None:
    """Writes an effect to its own folder; `effect.json` comes last, so that its presence means the rest is whole."""
    write_frame(folder / "rows.parquet", effect.rows)
    write_frame(folder / "cost.parquet", effect.cost)
    write_atomic(folder / "plan.json", plan_json + "\n")
    stated = {
        "plan_hash": effect.plan_hash,
        "plan_text": effect.plan_text,
        "settings": asdict(effect.settings),
        "provenance": dict(effect.provenance),
        "summary": effect.summary(),
    }
    write_json(folder / "effect.json", stated)


def read_effect(folder: Path) -> Effect:
    """Reads an effect; its figures are computed again from its rows.

    Raises:
        RunError: if a file is missing or damaged.
    """
    stated = read_json(folder / "effect.json")
    if stated["settings"]["max_ppl_ratio"] is None:  # JSON has no infinity
        stated["settings"]["max_ppl_ratio"] = math.inf
    return Effect(
        rows=read_frame(folder / "rows.parquet"),
        cost=read_frame(folder / "cost.parquet"),
        plan_hash=stated["plan_hash"],
        plan_text=stated["plan_text"],
        settings=EffectSettings(**stated["settings"]),
        provenance=stated["provenance"],
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
