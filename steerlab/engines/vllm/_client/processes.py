"""The processes that an engine starts, and how they are ended."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from steerlab.engines.vllm._wire.shutdown import GRACE, WORKER_GRACE

if TYPE_CHECKING:
    from psutil import Process


def be_patient() -> None:
    """Has the engines that this process starts give their workers time to end, unless the user has set it."""
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(WORKER_GRACE))


def descendants() -> "list[Process]":
    """All running child processes of this one, at any depth, without those that stay as long as it does.

    These are Python's resource tracker and torch's compile workers, which an engine in this process leaves behind.
    """
    import psutil  # comes with vLLM

    return [process for process in psutil.Process().children(recursive=True) if not _stays(process)]


def end(processes: "Sequence[Process]", grace: float = GRACE) -> None:
    """Waits for processes to end; terminates and then kills those that do not."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=grace)
    for process in alive:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(alive, timeout=grace)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=grace)


def _signal(action: Callable[[], None]) -> None:
    import psutil

    try:
        action()
    except psutil.NoSuchProcess:
        return


def _stays(process: "Process") -> bool:
    import psutil

    try:
        return any("resource_tracker" in part or "compile_worker" in part for part in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
