"""Functions run in processes of their own, all forked from one that has imported what they need.

That one is started by the first call and runs nothing else, so it can be forked where the test process, whose libraries
may have threads, cannot.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.lens.device_scenarios", "tests.sequences.two_processes"])


@dataclass(frozen=True)
class Forked:
    """A function that runs in a process of its own."""

    process: BaseProcess
    answer: Connection

    def result(self, seconds: float | None = None) -> Any:
        """What the function returns.

        Args:
            seconds: how long to wait before the process is killed.

        Raises:
            AssertionError: if the function raises, with its traceback, or its process ends without an answer.
        """
        error: str | None = "no answer in time"
        value = None
        try:
            if self.answer.poll(seconds):
                value, error = self.answer.recv()
        except EOFError:
            error = "the process ended"
        finally:
            if error == "no answer in time":
                self.process.kill()
            self.process.join()
        assert error is None, error
        return value


def start_forked(function: Callable[..., Any], *arguments: Any) -> Forked:
    """Starts a function of a module that can be imported."""
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_send, args=(sending, function, arguments))
    process.start()
    sending.close()
    return Forked(process, receiving)


def run_forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module that can be imported returns."""
    return start_forked(function, *arguments).result()


def _send(sending: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sending.send((function(*arguments), None))
    except Exception:
        sending.send((None, traceback.format_exc()))
