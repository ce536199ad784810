"""Findings on disk: a result object as a folder of one JSON file and its frames as Parquet."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steerlab.core.errors import RunError
from steerlab.experiment._store.frames import read_frame, write_frame
from steerlab.experiment._store.run_folder import RunFolder, read_json
from steerlab.steering.plan import Plan, vector_from_json, vector_json
from steerlab.steering.vectors import SteeringVector

FINDING_FILE = "finding.json"


def write_finding(folder: RunFolder, place: str, finding: Any) -> None:
    """Writes a finding; its JSON file comes last, so that its presence means the rest is whole."""
    fields = {field.name: getattr(finding, field.name) for field in dataclasses.fields(finding)}
    for name, value in fields.items():
        if isinstance(value, pd.DataFrame):
            write_frame(folder, f"{place}/{name}.parquet", value)
    stated = {name: _encoded(name, value) for name, value in fields.items()}
    folder.write(f"{place}/{FINDING_FILE}", json.dumps(stated, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_finding(folder: Path, made: type, nested: Sequence[type] = ()) -> Any:
    """Reads a finding.

    Args:
        folder: where it lies.
        made: its dataclass.
        nested: dataclasses that its fields may hold.

    Raises:
        RunError: if a file is missing or damaged.
    """
    stated = read_json(folder / FINDING_FILE)
    try:
        classes = {one.__name__: one for one in nested}
        return made(**{name: _decoded(value, folder, classes) for name, value in stated.items()})
    except (TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{folder} is damaged: {error}.") from error


def _encoded(name: str, value: Any) -> Any:
    """A value as JSON; what JSON has no form for stands under a name that starts with `$`."""
    if isinstance(value, pd.DataFrame):
        return {"$frame": name}
    if isinstance(value, Plan):
        return {"$plan": value.to_json()}
    if isinstance(value, SteeringVector):
        return {"$vector": vector_json(value)}
    if isinstance(value, frozenset):
        return {"$set": sorted(value)}
    if isinstance(value, tuple):
        return {"$tuple": [_encoded(name, item) for item in value]}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"$object": type(value).__name__, "fields": {key: _encoded(key, item) for key, item in fields.items()}}
    if isinstance(value, Mapping):
        return {str(key): _encoded(str(key), item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encoded(name, item) for item in value]
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return {"$float": str(plain)}
    return plain


def _decoded(value: Any, folder: Path, classes: Mapping[str, type]) -> Any:
    def inner(item: Any) -> Any:
        return _decoded(item, folder, classes)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$frame" in value:
        return read_frame(folder / f"{value['$frame']}.parquet")
    if "$plan" in value:
        return Plan.from_json(value["$plan"])
    if "$vector" in value:
        return vector_from_json(value["$vector"])
    if "$set" in value:
        return frozenset(value["$set"])
    if "$tuple" in value:
        return tuple(inner(item) for item in value["$tuple"])
    if "$float" in value:
        return float(value["$float"])
    if "$object" in value:
        return classes[value["$object"]](**{key: inner(item) for key, item in value["fields"].items()})
    return {key: inner(item) for key, item in value.items()}
