"""An effect as a folder of a run."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steerlab.core._json import json_text
from steerlab.core.errors import RunError
from steerlab.experiment._store.frames import read_frame, write_frame
from steerlab.experiment._store.run_folder import RunFolder, read_bytes, read_json
from steerlab.experiment.measurements.effect._settings import EffectSettings
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.steering.plan import Plan

_CHECKED = ("slope", "ci", "curvature", "anti_steerable", "null_ranks", "verdict")
_CHECKED_SINCE_RULE_2 = ("equivalence_ci", "margin", "detectable", "needed_groups")


def write_effect(folder: RunFolder, place: str, measured: tuple[Effect, Plan]) -> None:
    """Writes an effect and its plan; `effect.json` comes last, so that its presence means the rest is whole."""
    effect, plan = measured
    write_frame(folder, f"{place}/rows.parquet", effect.rows)
    write_frame(folder, f"{place}/cost.parquet", effect.cost)
    folder.write(f"{place}/plan.json", plan.to_json() + "\n")
    stated = {
        "plan_hash": effect.plan_hash,
        "plan_text": effect.plan_text,
        "settings": asdict(effect.settings),
        "provenance": dict(effect.provenance),
        "summary": effect.summary(),
    }
    folder.write(f"{place}/effect.json", json_text(stated))


def read_effect(folder: Path) -> tuple[Effect, Plan]:
    """Reads an effect and its plan; the figures are computed again from the rows.

    Raises:
        RunError: if a file is missing or damaged.
    """
    plan = Plan.from_json(read_bytes(folder / "plan.json").decode("utf-8"))
    return _effect(folder, read_json(folder / "effect.json")), plan


def check_effect(folder: Path) -> None:
    """Checks that the figures that `effect.json` states follow from the rows.

    Raises:
        RunError: if one does not: it was changed.
    """
    file = read_json(folder / "effect.json")
    stated, found = file["summary"], _effect(folder, file).summary()
    if (stated["verdict"], found["verdict"]) == ("no effect", "not tested"):
        stated["verdict"] = "not tested"  # what earlier versions called an effect without nulls
    later = _CHECKED_SINCE_RULE_2 if found["settings"]["rule"] != 1 else ()
    for name in (*_CHECKED, *later):
        if not _same(stated[name], found[name]):
            raise RunError(f"it states {name} {stated[name]!r}, and its rows give {found[name]!r}")


def _effect(folder: Path, stated: dict[str, Any]) -> Effect:
    if stated["settings"]["max_ppl_ratio"] is None:  # JSON has no infinity
        stated["settings"]["max_ppl_ratio"] = math.inf
    return Effect(
        rows=read_frame(folder / "rows.parquet"),
        cost=read_frame(folder / "cost.parquet"),
        plan_hash=stated["plan_hash"],
        plan_text=stated["plan_text"],
        settings=EffectSettings(**({"rule": 1} | stated["settings"])),  # versions before rule 2 noted none
        provenance=stated["provenance"],
    )


def _same(stated: Any, found: Any) -> bool:
    if isinstance(found, list | tuple):
        return len(stated) == len(found) and all(map(_same, stated, found))
    if isinstance(found, dict):
        return stated.keys() == found.keys() and all(_same(stated[key], found[key]) for key in found)
    if isinstance(found, float):
        return (
            stated is None
            if not math.isfinite(found)
            else stated is not None and math.isclose(stated, found, rel_tol=1e-9)
        )
    return stated == found
