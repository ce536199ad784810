"""The vectors that a plan adds to the stream, for formats that store nothing else."""

import torch
from torch import Tensor

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import VectorFileError
from steerlab.steering.files import check_no_low_rank
from steerlab.steering.operators._edit import Edit
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where as positions
from steerlab.steering.vectors import SteeringVector, VectorSet


def added_vectors(vectors: VectorSet | SteeringVector | Plan) -> dict[HookPoint, Tensor]:
    """What is added at each hook point, float32 [d_model]; a plan's additions at one hook point are summed.

    Raises:
        VectorFileError: if a plan does more than add vectors at every position, leaves a dose open, or is empty.
    """
    if isinstance(vectors, SteeringVector):
        check_no_low_rank([vectors], "A control-vector file")
        return {vectors.hook_point: vectors.values}
    if isinstance(vectors, VectorSet):
        check_no_low_rank(vectors.by_layer, "A control-vector file")
        found = {vector.hook_point: vector.values for vector in vectors.by_layer}
    elif isinstance(vectors, Plan):
        found = _sums(vectors)
    else:
        raise VectorFileError(f"What is exported is a vector, a vector set or a plan; got {type(vectors).__name__}.")
    if not found:
        raise VectorFileError("There is nothing to export: no vector is here.")
    return found


def _sums(plan: Plan) -> dict[HookPoint, Tensor]:
    sums: dict[HookPoint, Tensor] = {}
    for edit in plan:
        row = _addition(edit)
        before = sums.get(edit.hook_point)
        sums[edit.hook_point] = row if before is None else before + row
    return sums


def _addition(edit: Edit) -> Tensor:
    problem = _problem(edit)
    row = None if problem else edit.constant_delta(torch.device("cpu"), torch.float32)
    if row is None:
        raise VectorFileError(
            f"A control-vector file states nothing but vectors added at every position; it cannot state "
            f"'{edit}', which {problem or 'does not add a constant'}."
        )
    return row[0].clone()


def _problem(edit: Edit) -> str | None:
    """What a file of vectors cannot state about an edit; None if it can state all."""
    if edit.operator.to_json().get("kind") != "add":
        return "is not an add"
    if edit.where.to_json() != positions.all().to_json():
        return "acts at some positions only; write it with where=sl.where.all()"
    if edit.needs_median_norm and edit.median_norm is None:
        return "gives a dose; resolve the plan with plan.resolved(engine.median_norm) first"
    # Whatever else an edit may state (a schedule, a condition, a kept norm) is part of its content.
    plain = Edit(edit.operator, edit.vector, edit.where, scale=edit.scale, median_norm=edit.median_norm)
    more = plain.content() != edit.content()
    return "states more than a strength (a schedule, a condition or a kept norm)" if more else None
