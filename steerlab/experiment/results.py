"""Results: what an experiment has measured, in memory and in its run directory."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from steerlab.core.errors import RunError
from steerlab.experiment import storage
from steerlab.experiment.comparisons import with_comparisons
from steerlab.experiment.confirmation import Confirmation
from steerlab.experiment.effect import Effect
from steerlab.experiment.findings import read_finding, write_finding
from steerlab.experiment.interaction import Interaction
from steerlab.experiment.parity import Parity
from steerlab.experiment.run_folder import read_bytes
from steerlab.experiment.selection import Selection
from steerlab.experiment.selfcheck import SelfCheck
from steerlab.experiment.session import Session
from steerlab.experiment.transfer import Transfer
from steerlab.steering.plan import Plan
from steerlab.steering.vectors import VectorSet

# Kinds of records, each with the attribute of `Results` that lists them: one frame each, or an object.
FRAMES = {
    "cost": "costs",
    "entropy": "entropies",
    "generations": "generations",
}
FINDINGS = {
    "selfcheck": "selfchecks",
    "selection": "selections",
    "confirmation": "confirmations",
    "interaction": "interactions",
    "transfer": "transfers",
    "parity": "parities",
}
_LISTS = {"effect": "effects", "vectors": "vectors", **FRAMES, **FINDINGS}


@dataclass
class Results:
    """What an experiment has produced so far, in order; what is measured again takes its old place.

    Attributes:
        effects: effects, with the plan each was measured for.
        costs: results of `cost`.
        entropies: results of `entropy`.
        generations: results of `generate`.
        vectors: results of `extract`.
        selfchecks: results of `selfcheck`.
        selections: results of `select`.
        confirmations: results of `confirm`.
        interactions: results of `interaction`.
        transfers: results of `transfer`.
        parities: results of `parity`.
    """

    effects: list[tuple[Effect, Plan]] = field(default_factory=list)
    costs: list[pd.DataFrame] = field(default_factory=list)
    entropies: list[pd.DataFrame] = field(default_factory=list)
    generations: list[pd.DataFrame] = field(default_factory=list)
    vectors: list[VectorSet] = field(default_factory=list)
    selfchecks: list[SelfCheck] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    confirmations: list[Confirmation] = field(default_factory=list)
    interactions: list[Interaction] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    parities: list[Parity] = field(default_factory=list)
    _keys: dict[str, dict[str, int]] = field(default_factory=dict, repr=False, compare=False)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in _LISTS.values())

    def find(self, kind: str, key: str) -> Any:
        """A result by its key; None if it is not here."""
        place = self._keys.get(kind, {}).get(key)
        return None if place is None else getattr(self, _LISTS[kind])[place]

    def put(self, kind: str, key: str, item: Any) -> None:
        """Adds a result, or replaces the one of that key; effects learn how many plans were tested."""
        self._place(kind, key, item)
        if kind == "effect":
            self._compare()

    def put_all(self, found: Iterable[tuple[str, str, Any]]) -> None:
        """Adds kinds, keys and results as `put` does; effects are compared once."""
        for kind, key, item in found:
            self._place(kind, key, item)
        self._compare()

    def _place(self, kind: str, key: str, item: Any) -> None:
        items, places = getattr(self, _LISTS[kind]), self._keys.setdefault(kind, {})
        if key in places:
            items[places[key]] = item
        else:
            places[key] = len(items)
            items.append(item)

    def _compare(self) -> None:
        told = with_comparisons([effect for effect, _ in self.effects])
        self.effects[:] = [(effect, plan) for effect, (_, plan) in zip(told, self.effects, strict=True)]


def keep(session: Session, results: Results, kind: str, key: str, item: Any) -> None:
    """Adds a result and writes it to the run directory."""
    session.open()
    results.put(kind, key, item)
    if session.folder is not None:
        number, _ = session.number(kind, key)
        _write(session, kind, number, results.find(kind, key))
    session.record(kind, key)


def read_back(session: Session, results: Results, records: Iterable[dict[str, Any]] | None = None) -> None:
    """Adds what a run directory holds.

    Raises:
        RunError: if a file is missing or damaged.
    """
    wanted = session.records if records is None else records
    results.put_all((r["kind"], r["key"], _read(session, r["kind"], r["number"])) for r in wanted)


def _write(session: Session, kind: str, number: int, item: Any) -> None:
    folder, place = session.folder, place_of(kind, number)
    assert folder is not None
    if kind == "effect":
        effect, plan = item
        storage.write_effect(folder, place, effect, plan.to_json())
    elif kind == "vectors":
        item.save(folder.path / place)
        folder.enter(place, read_bytes(folder.path / place))
    elif kind in FINDINGS:
        write_finding(folder, place, item)
    else:
        storage.write_frame(folder, place, item)


def _read(session: Session, kind: str, number: int) -> Any:
    path = session.path / place_of(kind, number)
    if kind == "effect":
        plan = Plan.from_json(read_bytes(path / "plan.json").decode("utf-8"))
        return storage.read_effect(path), plan
    if kind in FINDINGS:
        return read_finding(path, kind)
    return VectorSet.load(path) if kind == "vectors" else storage.read_frame(path)


def place_of(kind: str, number: int) -> str:
    """Where a record lies in the run directory.

    Raises:
        RunError: for a kind that this version does not know.
    """
    if kind not in _LISTS:
        raise RunError(f"The run holds a record of kind {kind!r}, which this version does not know.")
    if kind == "effect":
        return f"effects/{number:03d}"
    if kind in FINDINGS:
        return f"findings/{kind}-{number:03d}"
    return f"vectors/{number:03d}.safetensors" if kind == "vectors" else f"frames/{kind}-{number:03d}.parquet"
