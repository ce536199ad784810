"""How an experiment's results look on disk, and how they are read back.

::

    run.json              name, model, configuration, versions, and the list of what was measured
    cells/                scores/0f3a….parquet, …: finished measurements, each under the hash of what determines it
    inputs/               plans/….json, data/….json, each under its own hash; operators/….json of a user's own
    effects/000/          effect.json, plan.json, rows.parquet, cost.parquet
    frames/               cost-000.parquet, entropy-000.parquet, generations-000.parquet, …
    findings/             selection-000/finding.json with its frames, …
    vectors/000.safetensors
    looks/000000.json     what measured on which items, in order
    manifest.jsonl        the hash of every file above, as it was written
    report.html

Every file is written whole: a reader sees the old one or the new one.
"""

import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core.errors import RunError
from steerlab.experiment.effect import Effect, EffectSettings
from steerlab.experiment.run_folder import RunFolder, read_bytes, read_json


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


def write_effect(folder: RunFolder, place: str, effect: Effect, plan_json: str) -> None:
    """Writes an effect to its own folder; `effect.json` comes last, so that its presence means the rest is whole."""
    write_frame(folder, f"{place}/rows.parquet", effect.rows)
    write_frame(folder, f"{place}/cost.parquet", effect.cost)
    folder.write(f"{place}/plan.json", plan_json + "\n")
    stated = {
        "plan_hash": effect.plan_hash,
        "plan_text": effect.plan_text,
        "settings": asdict(effect.settings),
        "provenance": dict(effect.provenance),
        "summary": effect.summary(),
    }
    folder.write(f"{place}/effect.json", json_text(stated))


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
