"""A plugin of vLLM's that lets it fork its processes on a CPU, as it does on a GPU: they need not import it again.

By itself vLLM starts new ones there, each of which imports torch, Transformers and vLLM for ten seconds. And they wait
for each other without leaving the processor to anybody, where there may be fewer processors than processes.
"""

import gc
import os
import time
from pathlib import Path

from benchmarks.vllm_steering import python_path_with_plugin

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
ASKED_BY = "STEERLAB_TESTS_PROCESS"


def register() -> None:
    """Called by vLLM in each of its processes."""
    if os.environ[ASKED_BY] == str(os.getpid()):  # pytest, whose threads a fork would lose, but not what they hold
        return
    gc.freeze()  # what was imported is searched for garbage by no child, which would copy it
    gc.unfreeze = lambda: None
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms.cpu import CpuPlatform

    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)

    os.environ[METHOD] = "fork"
    settle = CpuPlatform.check_and_update_config

    def settle_and_fork(vllm_config: object) -> None:
        settle(vllm_config)
        os.environ[METHOD] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(settle_and_fork)


def environment(directory: Path) -> dict[str, str]:
    """What lets vLLM find the plugin in processes that are started with it.

    Args:
        directory: an empty one, for the plugin's metadata.
    """
    asked_by = os.environ.get(ASKED_BY, str(os.getpid()))
    return {"PYTHONPATH": python_path_with_plugin(directory, "forked", __name__), ASKED_BY: asked_by}
