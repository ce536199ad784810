"""What the workers of a started engine say of themselves, checked: each must be wired, and ranks must agree."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steerlab.core.errors import HookPointError
from steerlab.engines.vllm._wire.config import SteeringConfig

NOT_LOADED = (
    "A vLLM worker is not wired for steering: its process did not load steerlab's plugin. Check that steerlab is "
    "installed in the environment that vLLM runs in (its entry point `vllm.general_plugins`), and that VLLM_PLUGINS, "
    "if set, names `steerlab`."
)


def check_workers(workers: list[dict[str, Any]], config: SteeringConfig) -> list[dict[str, Any]]:
    """What workers say of themselves, if together they are wired as asked.

    Raises:
        HookPointError: otherwise.
    """
    for worker in workers:
        if not worker["wired"]:
            raise HookPointError(worker["reason"] or NOT_LOADED)
    held = {point for worker in workers for point in worker["points"]}
    missing = sorted({point.layer for index, point in enumerate(config.points) if index not in held})
    if missing:
        raise HookPointError(f"No worker holds the layers {missing}, so they cannot be wired.")
    _check_ranks_agree(workers)
    return workers


def _check_ranks_agree(workers: Sequence[Mapping[str, Any]]) -> None:
    """Tensor-parallel ranks of one pipeline stage must hold the same stream, to be edited alike."""
    stages: dict[int, Mapping[str, Any]] = {}
    for worker in workers:
        first = stages.setdefault(worker["pp"], worker)
        same = worker["rule"] == first["rule"] and np.allclose(worker["digest"], first["digest"], rtol=1e-2)
        if not same:
            raise HookPointError(
                f"Tensor-parallel ranks {first['tp']} and {worker['tp']} hold different streams after the layers of "
                "one stage; this family cannot be steered inside vLLM under tensor parallelism."
            )
