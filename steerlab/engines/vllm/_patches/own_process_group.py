"""Wraps `Executor.__init__` in `vllm.v1.executor.abstract`.

An interrupt, from the keyboard or from Jupyter, reaches every process of the caller's group, and vLLM's engine shuts
down at it: who stops a call would lose the engine. An engine that is shutting down when its server tells it to dies at
once, and leaves its shared memory behind. So the process of an engine that steerlab started leaves the group before it
starts its workers. The interrupt then reaches the caller alone. What kills the group does not reach the engine either,
so it watches for the caller's end, and does not outlive it.
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

from steerlab.engines.vllm._wire.config import is_ours
from steerlab.engines.vllm._wire.shutdown import GRACE, end_quickly

_MARK, _ENGINE = "_steerlab_installed", "EngineCore"


def install() -> None:
    """Patches the class; a second call changes nothing."""
    from vllm.v1.executor.abstract import Executor

    original = Executor.__init__
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any) -> None:
        is_own_process = multiprocessing.current_process().name.startswith(_ENGINE)
        if is_own_process and is_ours(vllm_config):
            end_quickly()
            os.setpgid(0, 0)
            threading.Thread(target=_end_with_caller, daemon=True, name="steerlab-caller").start()
        original(self, vllm_config)

    setattr(init, _MARK, True)
    Executor.__init__ = init


def _end_with_caller() -> None:
    """Waits until the process that started this one is gone; then this one and its workers shut down, or are killed."""
    caller = multiprocessing.parent_process()
    if caller is None:
        return
    caller.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgid(0), signal.SIGKILL)
