"""A plugin of vLLM's that lets it fork its processes on a CPU, as it does on a GPU: they need not import it again.

By itself vLLM starts new ones there, each of which imports torch, Transformers and vLLM for ten seconds.
"""

import os
from pathlib import Path

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
ASKED_BY = "STEERLAB_TESTS_PROCESS"


def register() -> None:
    """Called by vLLM in each of its processes."""
    if os.environ[ASKED_BY] == str(os.getpid()):  # pytest, whose threads a fork would lose, but not what they hold
        return
    from vllm.platforms.cpu import CpuPlatform

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
    info = directory / "steerlab_tests-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steerlab-tests\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nforked = {__name__}:register\n")
    paths = [str(directory), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), ASKED_BY: str(os.getpid())}
