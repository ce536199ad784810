"""A run: the session of an experiment together with what it has measured; every measurement works on one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from steerlab.core._hashing import content_hash
from steerlab.core.errors import RunError, SteerlabError, UnknownOperatorError
from steerlab.experiment._store.cells import Cell, ResumeNotice
from steerlab.experiment._store.results import Kind, Results
from steerlab.experiment._store.session import Session


class Run:
    """A session and its results.

    Attributes:
        session: engine, run directory and finished cells.
        results: everything measured so far, by kind.
        requested: keys of results that were asked for in this process.

    Args:
        session: the session; what its run directory holds is read.
        kinds: the kinds of results there are.

    Raises:
        RunError: if a file of the run directory is missing or damaged.
    """

    def __init__(self, session: Session, kinds: Sequence[Kind]) -> None:
        self.session, self.results = session, Results(kinds)
        self.requested: set[str] = set()
        try:
            self.read(session.records)
        except (RunError, UnknownOperatorError):
            raise
        except (SteerlabError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"The run in {session.path} is damaged: {type(error).__name__}: {error}.") from error

    def read(self, records: Iterable[dict[str, Any]]) -> None:
        """Adds what the run directory holds of these records."""
        self.results.put_all((r["kind"], r["key"], self._read(r["kind"], r["number"])) for r in records)

    def key(self, kind: str, what: Any) -> str:
        """Names a result by everything that determines it besides engine and seed."""
        return Cell(kind, {"content": content_hash(what), "seed": self.session.seed}).key(self.session.engine_hash)

    def find(self, kind: str, what: Any) -> Any:
        """A result that was kept with the same `what`; None if there is none."""
        return self.results.find(kind, self.key(kind, what))

    def keep(self, kind: str, what: Any, item: Any) -> Any:
        """Adds a result and writes it to the run directory; returns it."""
        self.keep_as(kind, self.key(kind, what), item)
        return item

    def keep_as(self, kind: str, key: str, item: Any) -> Any:
        """As `keep`, under a key of its own; returns the result as the run lists it."""
        self.session.open()
        self.results.put(kind, key, item)
        listed = self.results.find(kind, key)
        if self.session.folder is not None:
            number, _ = self.session.number(kind, key)
            found = self.results.kind(kind)
            found.write(self.session.folder, found.pattern.format(number), listed)
        self.session.record(kind, key)
        return listed

    def look(self, kind: str, asked: Callable[[], tuple[Sequence[Any], Any]]) -> AbstractContextManager[None]:
        """Counts the block as a look at items; see `Looks.at`."""
        return self.session.looks.at(kind, asked)

    @contextmanager
    def measuring(self, kind: str, asked: Callable[[], tuple[Sequence[Any], Any]]) -> Iterator[None]:
        """As `look`, and says how many cells of the measurement an earlier run had finished."""
        with self.look(kind, asked), ResumeNotice(self.session.cells, kind):
            yield

    def _read(self, kind: str, number: int) -> Any:
        found = self.results.kind(kind)
        return found.read(self.session.path / found.pattern.format(number))
