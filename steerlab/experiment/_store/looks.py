"""Looks: every time items were measured on, by whatever call, so that a confirmation can say which look it is.

A look is counted once its call has read or made a figure of the items, whether or not the call then ended well. The
n-th identical call of an experiment object is the n-th such look: called again it is one more, while a later run of the
same script, or one resumed after it was killed, repeats the looks that are recorded and adds none.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerlab.core._hashing import content_hash
from steerlab.core._text import PromptLike, plain_text
from steerlab.core.targets import Targets
from steerlab.experiment._store.cells import Cells
from steerlab.experiment._store.inputs import Inputs
from steerlab.experiment._store.run_folder import RunFolder, read_json

FOLDER = "looks"


@dataclass(frozen=True)
class Look:
    """One measurement on items or texts.

    Attributes:
        kind: what measured them, e.g. `effect`.
        key: what was asked, equal for equal calls.
        contents: hash of what was measured on.
        prompts: hashes of its prompts and texts.
    """

    kind: str
    key: str
    contents: str
    prompts: frozenset[str]


class Looks:
    """The looks of one run, in order: on disk a small file each, so that every run of the folder counts them.

    Args:
        folder: the run directory; None keeps them in memory only.
        inputs: where the hashes of prompts are kept, once per set.
        cells: the run's finished measurements; a call that reads or makes one has looked.
    """

    def __init__(self, folder: RunFolder | None, inputs: Inputs, cells: Cells) -> None:
        self._folder, self._inputs, self._cells = folder, inputs, cells
        self._known: list[dict[str, str]] = []
        self._finished: Counter[str] = Counter()

    @staticmethod
    def key(kind: str, items: Sequence[Any], what: Any) -> str:
        """What equal calls share; arguments as `at` asks for them."""
        return content_hash([kind, _contents(items), what])

    @contextmanager
    def at(self, kind: str, asked: Callable[[], tuple[Sequence[Any], Any]]) -> Iterator[None]:
        """Counts the block as a look if it reads or makes a cell, or ends well.

        A block that an error or an interrupt ended counts as the look that the same call, made again, will finish.

        Args:
            kind: what measures.
            asked: gives what is measured on (targets, or lists of prompts or texts) and everything that
                distinguishes the call from others; called when the block ends and its arguments are known to be usable.
        """
        before = self._cells.reused + self._cells.measured
        done = False
        try:
            yield
            done = True
        finally:
            if done or self._cells.reused + self._cells.measured > before:
                self._count(kind, *asked(), done)

    def forget(self) -> None:
        """Forgets what was recorded, after the run directory was cleared."""
        self._known.clear()

    def _count(self, kind: str, items: Sequence[Any], what: Any, done: bool) -> None:
        prompts, key = _contents(items), self.key(kind, items, what)
        if not prompts:
            return
        stated = self._stated()
        if sum(look["key"] == key for look in stated) <= self._finished[key]:
            self._write(len(stated), {"kind": kind, "key": key, "contents": self._inputs.add_data(prompts)})
        self._finished[key] += done

    def listed(self) -> list[Look]:
        """All looks so far, those of earlier runs of the folder included.

        Raises:
            RunError: if a file is missing or damaged.
        """
        stated = self._stated()
        prompts = {name: frozenset(self._inputs.data(name)) for name in {look["contents"] for look in stated}}
        return [Look(look["kind"], look["key"], look["contents"], prompts[look["contents"]]) for look in stated]

    def _stated(self) -> list[dict[str, str]]:
        """What is recorded; of files only those are read that were not yet."""
        while self._folder is not None and (path := self._path(len(self._known))).exists():
            self._known.append(read_json(path))
        return self._known

    def _write(self, number: int, look: dict[str, str]) -> None:
        if self._folder is None:
            self._known.append(look)
        else:
            self._folder.write(f"{FOLDER}/{number:06d}.json", json.dumps(look) + "\n")

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder.path / FOLDER / f"{number:06d}.json"


def _contents(items: Sequence[Any]) -> list[str]:
    return sorted(set().union(*map(content_hashes, items)))


def content_hashes(items: Targets | Iterable[PromptLike] | None) -> frozenset[str]:
    """Hashes by which items are known again: of every prompt or text, and of every prompt with a target after it."""
    if items is None:
        return frozenset()
    if not isinstance(items, Targets):
        return frozenset(map(prompt_hash, items))
    whole = [
        item.prompt + target
        for item in items
        if isinstance(item.prompt, str)
        for target in item.targets
        if isinstance(target, str)
    ]
    return prompt_hashes(items) | frozenset(map(prompt_hash, whole))


def prompt_hash(prompt: PromptLike) -> str:
    """Content hash of a prompt, text apart from space around it."""
    return content_hash(prompt.strip() if isinstance(prompt, str) else plain_text(prompt))


def prompt_hashes(targets: Targets) -> frozenset[str]:
    return frozenset(prompt_hash(prompt) for prompt in targets.prompts)
