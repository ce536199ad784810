"""How long the processes of an engine get to end, on which both sides must agree."""

import atexit
import gc
import multiprocessing

GRACE = 30.0
"""Seconds that a process gets to end by itself, and again after it was asked to.

One that is killed leaves shared memory and semaphores behind, and Python's resource tracker complains of them. An end
takes some seconds, more on a busy machine.
"""

WORKER_GRACE = 20
"""Seconds that vLLM's engine gives its workers before it kills them; less than it gets itself."""


def end_quickly() -> None:
    """Has this process, if another one started it, end without Python's last search for garbage.

    That search takes seconds, longer on a busy machine, and then who waits for the process kills it.
    """
    if multiprocessing.parent_process() is not None:
        atexit.register(gc.freeze)
