"""Scoring on a model sharded by `fully_shard`: what the processes that share it must do alike.

Each pass gathers the parameters of a layer from all processes as it reaches it, so all must make equally many passes,
forward and backward. A process with fewer batches makes passes of one token whose results nobody reads.
"""

from collections.abc import Sequence

import numpy as np
import torch

from steerlab._runtime.model_parts import ModelParts
from steerlab._runtime.sharding import joined, most_of_all, reshard
from steerlab.core.errors import InputError
from steerlab.sequences._forcing import ForcedRow
from steerlab.sequences.config import FunctionalPrecision
from steerlab.steering._plan_assignment import AssignedPlan

__all__ = ["check_as_it_is", "joined", "passes_for_others", "reshard"]


def passes_for_others(
    parts: ModelParts, batches: Sequence[tuple[list[ForcedRow], AssignedPlan]]
) -> list[tuple[list[ForcedRow], AssignedPlan]]:
    """Batches to add so that every process makes as many passes as the one with most.

    Raises:
        InputError: on all processes, if one of them has nothing to score.
    """
    most, fewest = most_of_all(parts.root, len(batches)), -most_of_all(parts.root, -len(batches))
    if most and not fewest:
        raise InputError("A process that shares a sharded model has no response to score; give each at least one.")
    _, unsteered = batches[0] if batches else (None, None)
    row = ForcedRow(np.zeros(2, dtype=np.int64), 1, 0, 0, -1)
    return [([row], unsteered) for _ in range(most - len(batches))] if unsteered is not None else []


def check_as_it_is(parts: ModelParts, precision: FunctionalPrecision, has_override: bool) -> None:
    """Nothing, if a call runs the parameters as they are.

    Raises:
        InputError: for other parameters, and for narrow ones that the configuration would have widened.
    """
    if has_override:
        raise InputError(
            "A model sharded by fully_shard runs with its own parameters only; pass params_override and "
            "buffers_override to a processor on an unsharded copy."
        )
    dtypes = {p.dtype for p in parts.root.parameters() if p.dtype.is_floating_point}
    assert isinstance(precision.dtype, torch.dtype)
    narrow = [dtype for dtype in dtypes if torch.promote_types(dtype, precision.dtype) != dtype]
    if precision.cast_params and narrow:
        raise InputError(
            f"Parameters of a sharded model cannot be widened from {narrow[0]} to {precision.dtype} for a call. Set "
            "precision.func_override to {'cast_params': False}, which scores them as they are."
        )
