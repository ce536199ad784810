"""Results: what an experiment has measured, listed by kind, and how each kind lies in a run directory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steerlab.core.errors import RunError
from steerlab.display import Piece, Shown, Table, count
from steerlab.experiment._store.findings import read_finding, write_finding
from steerlab.experiment._store.frames import read_frame, write_frame
from steerlab.experiment._store.run_folder import RunFolder


@dataclass(frozen=True)
class Kind:
    """One kind of results.

    Attributes:
        name: what `run.json` calls it, e.g. `selection`.
        attribute: the attribute of `Results` that lists them, e.g. `selections`.
        pattern: where in the run directory the n-th lies, e.g. `findings/selection-{:03d}`.
        write: writes a result to a place of a run directory.
        read: reads the result that lies at a path.
        related: makes the list anew when a result is added; None if results do not depend on each other.
    """

    name: str
    attribute: str
    pattern: str
    write: Callable[[RunFolder, str, Any], None]
    read: Callable[[Path], Any]
    related: Callable[[list[Any]], list[Any]] | None = None


def frame_kind(name: str, attribute: str) -> Kind:
    """A kind whose results are frames."""
    return Kind(name, attribute, f"frames/{name}-{{:03d}}.parquet", write_frame, read_frame)


def finding_kind(name: str, attribute: str, made: type, nested: Sequence[type] = ()) -> Kind:
    """A kind whose results are dataclasses.

    Args:
        name: see `Kind`.
        attribute: see `Kind`.
        made: the dataclass. Its fields are frames, plans, vectors and plain values.
        nested: further dataclasses that its fields may hold.
    """
    read = partial(read_finding, made=made, nested=nested)
    return Kind(name, attribute, f"findings/{name}-{{:03d}}", write_finding, read)


class Results(Shown):
    """What an experiment has produced so far, in order; a result that is measured again replaces the old one.

    Each kind of result is a list: `effects` (pairs of an effect and its plan), `costs`, `entropies`, `generations`,
    `judgements`, `baselines`, `vectors`, `selfchecks`, `selections`, `confirmations`, `interactions`, `transfers`,
    `parities`.

    Args:
        kinds: the kinds there are.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        self._items: dict[str, list[Any]] = {kind.attribute: [] for kind in kinds}
        self._places: dict[str, dict[str, int]] = {kind.name: {} for kind in kinds}

    def __getattr__(self, name: str) -> list[Any]:
        try:
            return self.__dict__["_items"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._items]

    def __bool__(self) -> bool:
        return any(self._items.values())

    def _finding(self) -> str:
        return ", ".join(f"{len(items)} {name}" for name, items in self._items.items() if items) or "nothing yet"

    def _pieces(self) -> Sequence[Piece]:
        columns, found = ["kind", "number", "the last one"], self._items.items()
        return [Table(columns, [(name, len(items), _in_words(items[-1])) for name, items in found if items])]

    def by_attribute(self) -> dict[str, list[Any]]:
        """All lists by their names."""
        return dict(self._items)

    def kind(self, name: str) -> Kind:
        """A kind by its name.

        Raises:
            RunError: for a kind that this version does not know.
        """
        if name not in self._kinds:
            raise RunError(f"The run holds a record of kind {name!r}, which this version does not know.")
        return self._kinds[name]

    def find(self, kind: str, key: str) -> Any:
        """A result by its key; None if it is not here."""
        place = self._places[kind].get(key)
        return None if place is None else self._items[self._kinds[kind].attribute][place]

    def put(self, kind: str, key: str, item: Any) -> None:
        """Adds a result, or replaces the one of that key; results that depend on each other are related anew."""
        self.put_all([(kind, key, item)])

    def put_all(self, found: Iterable[tuple[str, str, Any]]) -> None:
        """Adds kinds, keys and results as `put` does; results that depend on each other are related once."""
        changed = set()
        for name, key, item in found:
            items, places = self._items[self.kind(name).attribute], self._places[name]
            if key in places:
                items[places[key]] = item
            else:
                places[key] = len(items)
                items.append(item)
            changed.add(name)
        for kind in map(self.kind, changed):
            if kind.related is not None:
                self._items[kind.attribute][:] = kind.related(self._items[kind.attribute])


def _in_words(item: Any) -> str:
    """A result in a line: what it found, or a frame's size."""
    shown = item[0] if isinstance(item, tuple) else item
    return shown._finding() if isinstance(shown, Shown) else f"a frame of {count(len(shown), 'row')}"
