"""Functions run in processes of their own, all forked from one that has imported what they need.

That one is started by the first call and runs nothing else, so it can be forked where the test process, whose libraries
have threads and which may be another test's, cannot.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.lens.device_scenarios", "tests.sequences.two_processes"])
METHOD = _CONTEXT.get_start_method()
"""For libraries that start processes themselves."""


def start_forked(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Starts a function of a module that can be imported."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def run_forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module that can be imported returns.

    Raises:
        AssertionError: if it raises, with its traceback, or its process ends.
    """
    receiving, sending = _CONTEXT.Pipe(duplex=False)
    process = start_forked(_send, sending, function, arguments)
    sending.close()
    try:
        value, error = receiving.recv()
    except EOFError:
        value, error = None, "its process ended"
    process.join()
    assert error is None, f"{function.__name__}: {error}"
    return value


def _send(sending: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sending.send((function(*arguments), None))
    except Exception:
        sending.send((None, traceback.format_exc()))
