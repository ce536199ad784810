"""What every measurement of an experiment shares: its session, its results, and how a result is kept."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core.engine import Engine
from steerlab.core.errors import RunError, SteerlabError, UnknownOperatorError
from steerlab.core.hashing import content_hash
from steerlab.core.shipped import neutral_text
from steerlab.core.text import PromptLike, as_prompts
from steerlab.experiment.cells import Cell
from steerlab.experiment.confirmation import Confirmation
from steerlab.experiment.effect import Effect
from steerlab.experiment.looks import Look
from steerlab.experiment.results import Results, keep, read_back
from steerlab.experiment.session import Session


class Kept:
    """An experiment without its measurements.

    Attributes:
        results: everything measured so far, by kind.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.results = Results()
        self._checked: set[str] = set()  # selfchecks of this process
        try:
            read_back(session, self.results)
        except (RunError, UnknownOperatorError):
            raise
        except (SteerlabError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"The run in {session.path} is damaged: {type(error).__name__}: {error}.") from error

    @property
    def name(self) -> str:
        """Its name."""
        return self._session.name

    @property
    def backend(self) -> str:
        """What runs the model: `lens` or `vllm`."""
        return self._session.backend

    @property
    def seed(self) -> int:
        """Seed of controls, bootstrap and sampling."""
        return self._session.seed

    @property
    def path(self) -> Path:
        """The run directory.

        Raises:
            RunError: with `root=None`, if there is none.
        """
        return self._session.path

    @property
    def engine(self) -> Engine:
        """The engine, loaded at first use."""
        return self._session.engine

    @property
    def effects(self) -> list[Effect]:
        """Every effect measured so far, each told how many plans were tested on its items.

        Examples:
            >>> [effect.verdict for effect in exp.effects]
            ['no effect']
        """
        return [effect for effect, _ in self.results.effects]

    @property
    def looks(self) -> "list[Look | Confirmation]":
        """Every look at items or texts so far, by whatever call, those of earlier runs of the folder included.

        A run of a version that recorded no looks counts its confirmations.
        """
        found = self._session.looks.listed()
        confirmations = self.results.confirmations
        unrecorded = len(confirmations) - sum(look.kind == "confirm" for look in found)
        return [*confirmations[: max(0, unrecorded)], *found]

    def _look(self, kind: str, asked: Callable[[], tuple[Sequence[Any], Any]]) -> AbstractContextManager[None]:
        return self._session.looks.at(kind, asked)

    def _key(self, kind: str, what: list[Any]) -> str:
        return Cell(kind, {"content": content_hash(what), "seed": self.seed}).key(self._session.engine_hash)

    def _find(self, kind: str, what: list[Any]) -> Any:
        return self.results.find(kind, self._key(kind, what))

    def _keep_finding(self, kind: str, found: Any, what: list[Any]) -> Any:
        keep(self._session, self.results, kind, self._key(kind, what), found)
        return found

    def _keep_frame(self, kind: str, frame: pd.DataFrame, what: list[Any]) -> pd.DataFrame:
        keep(self._session, self.results, kind, self._key(kind, what), frame)
        return frame

    def _neutral(self, texts: Sequence[PromptLike] | None) -> list[PromptLike]:
        if texts is None:
            return [paragraph for paragraph in neutral_text().split("\n\n") if paragraph.strip()]
        return as_prompts(texts)
