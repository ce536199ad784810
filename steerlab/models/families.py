"""Families of models: what was checked on which engine, how and when; one table, shipped with the package."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

TABLE = Path(__file__).with_name("families.json")
ENGINES = ("bridge", "fast", "graph", "vllm")
FEATURES = ("edit", "capture", "score", "quantised")

State = Literal["checked", "refused", "open"]


@dataclass(frozen=True)
class Check:
    """A way in which families were checked.

    Attributes:
        how: the test or script, and what it compares.
        versions: of the libraries, and on what.
        when: every test run, or the day.
    """

    how: str
    versions: str
    when: str


@dataclass(frozen=True)
class Cell:
    """What is known of one feature of one engine on one family.

    Attributes:
        state: `checked`; `refused`, for a reason; or `open`, which nobody has tried.
        note: the names of the checks, or the reason.
    """

    state: State
    note: str = ""

    def __str__(self) -> str:
        return {"checked": "yes", "refused": "no", "open": "–"}[self.state]


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: Hugging Face's `model_type`.
        label: as people call it.
        cells: by engine and feature.
    """

    name: str
    label: str
    cells: Mapping[tuple[str, str], Cell]

    def reasons(self) -> list[str]:
        """Why features are refused, each reason once, with the engine."""
        found = {f"{engine}: {cell.note}": None for (engine, _), cell in self.cells.items() if cell.state == "refused"}
        return list(found)


@cache
def families() -> dict[str, Family]:
    """The table's families, by `model_type`."""
    return {
        name: Family(
            name,
            entry["label"],
            {(e, f): _cell(entry["engines"][e][f]) for e in ENGINES for f in FEATURES},
        )
        for name, entry in _table()["families"].items()
    }


@cache
def checks() -> dict[str, Check]:
    """The ways in which they were checked, by name."""
    return {name: Check(**entry) for name, entry in _table()["checks"].items()}


def _table() -> dict:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def _cell(written: str | None) -> Cell:
    if written is None:
        return Cell("open")
    return Cell("refused", written[1:]) if written.startswith("-") else Cell("checked", written)
