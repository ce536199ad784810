"""Requests that wait at the same time and may run together, run together; one call to the engine at a time."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread

from steerlab.core.errors import SteerlabError

GATHERING = 0.05
"""Seconds that a request waits for others which are made at the same moment."""

Settings = TypeVar("Settings", bound=Hashable)
Prompt = TypeVar("Prompt")
Found = TypeVar("Found")


@dataclass(eq=False)
class _Waiting(Generic[Settings, Prompt, Found]):
    """A request, and what came of it: an answer, or what was wrong."""

    settings: Settings
    prompt: Prompt
    found: Any = None

    def answer(self) -> Found:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Batches(Generic[Settings, Prompt, Found]):
    """Answers requests in batches of those with equal settings.

    Args:
        run: answers prompts with the same settings, in order; it runs in a thread of its own, never twice at a time. An
            exception in place of an answer is raised for that prompt alone.
    """

    def __init__(self, run: Callable[[Settings, Sequence[Prompt]], Sequence[Found | SteerlabError]]) -> None:
        self._run = run
        self._waiting: list[_Waiting[Settings, Prompt, Found]] = []
        self._turn = anyio.Lock()

    async def answer(self, settings: Settings, prompt: Prompt) -> Found:
        """The answer to one request.

        Raises:
            SteerlabError: what was wrong with it; others in its batch go on.
        """
        mine = _Waiting[Settings, Prompt, Found](settings, prompt)
        self._waiting.append(mine)
        try:
            await anyio.sleep(GATHERING)
            async with self._turn:
                if mine.found is None:
                    together = [one for one in self._waiting if one.found is None and one.settings == settings]
                    await anyio.to_thread.run_sync(self._answer, settings, together)
        finally:
            self._waiting.remove(mine)
        return mine.answer()

    def _answer(self, settings: Settings, together: Sequence[_Waiting[Settings, Prompt, Found]]) -> None:
        """Answers requests; if they cannot run together, each alone, so that a bad one fails by itself."""
        try:
            found = self._run(settings, [one.prompt for one in together])
        except Exception as error:
            if len(together) == 1:
                together[0].found = error
                return
            for one in together:
                self._answer(settings, [one])
            return
        for one, answer in zip(together, found, strict=True):
            one.found = answer
