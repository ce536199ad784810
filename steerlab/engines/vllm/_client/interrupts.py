"""An interrupt during a call, deferred until it falls between messages to the engine.

What vLLM's client sends to its engine goes out in parts, and an engine in this process names cache blocks before they
are filled: an exception in between breaks what comes after.
"""

import contextlib
import signal
import threading
from typing import Any


class DeferredInterrupt(contextlib.AbstractContextManager["DeferredInterrupt"]):
    """While it is entered, a first interrupt waits for `check`, or for the end. A second one is let through at once.

    It does nothing outside of the main thread, which alone is interrupted, or where interrupts are ignored.

    Attributes:
        is_torn: whether one was let through at once, so that what it cut off is unknown.
    """

    def __init__(self) -> None:
        self.is_torn = False
        self._is_waiting = False
        self._usual: Any = None

    def __enter__(self) -> "DeferredInterrupt":
        usual = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(usual):
            self._usual = usual
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Lets an interrupt through that has waited: raises KeyboardInterrupt, if that is what it usually does."""
        if self._is_waiting:
            self._is_waiting = False
            self._usual(signal.SIGINT, None)

    def _note(self, number: int, frame: Any) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            return
        self.is_torn = True
        self._usual(number, frame)
        self.is_torn = False  # it did not raise
