"""Plans as they travel: each distinct one once, as JSON, and the values of their vectors as arrays, each once too."""

import binascii
import hashlib
import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from steerlab.core.errors import InputError, PlanError
from steerlab.engines._http.frames import Arrays
from steerlab.steering._plan_assignment import PlanArgument, plan_key
from steerlab.steering.packing import pack
from steerlab.steering.plan import Plan

_TENSOR = "$tensor"
"""The one key of what stands for a vector's values."""


def plans_message(plan: PlanArgument, d_model: int) -> tuple[dict[str, Any], Arrays]:
    """A call's plans, and the vectors in them.

    Args:
        plan: a plan, None, or a list with one per prompt.
        d_model: values of a vector.

    Returns:
        `plans`, and `plan_of`: which of them each prompt has, or all have; None stands for none.

    Raises:
        PlanError: for something that is not a plan.
    """
    given: list[Any] = list(plan) if isinstance(plan, list | tuple) else [plan]
    places: dict[Any, int] = {}
    plans: list[Any] = []
    arrays: Arrays = {}
    plan_of: list[int | None] = []
    for one in given:
        if one is not None and not isinstance(one, Plan):
            raise PlanError(
                f"plan takes a Plan, None, or a list of them, got {type(one).__name__}; wrap edits in Plan()."
            )
        if one is None:
            plan_of.append(None)
            continue
        key = plan_key(one)
        if key not in places:
            places[key] = len(plans)
            plans.append(_lifted(json.loads(one.to_json()), d_model, arrays))
        plan_of.append(places[key])
    return {"plans": plans, "plan_of": plan_of if isinstance(plan, list | tuple) else plan_of[0]}, arrays


def plans_in(content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PlanArgument:
    """The plans of a call, as `plan=` takes them.

    Raises:
        PlanError, InputError: for something that `plans_message` does not write.
    """
    stored, plan_of = content.get("plans", []), content.get("plan_of")
    if not isinstance(stored, list):
        raise InputError("`plans` is a list of plans.")
    plans = [Plan.from_json(json.dumps(_placed(one, arrays))) for one in stored]

    def chosen(index: Any) -> Plan | None:
        if index is not None and not (type(index) is int and 0 <= index < len(plans)):
            raise InputError(f"`plan_of` names one of {len(plans)} plans, or none; got {index!r:.40}.")
        return None if index is None else plans[index]

    return [chosen(index) for index in plan_of] if isinstance(plan_of, list) else chosen(plan_of)


def _lifted(part: Any, d_model: int, arrays: Arrays) -> Any:
    """JSON with packed vectors taken out of it."""
    if isinstance(part, dict):
        return {key: _lifted(value, d_model, arrays) for key, value in part.items()}
    if isinstance(part, list):
        return [_lifted(value, d_model, arrays) for value in part]
    values = _values(part, d_model) if isinstance(part, str) else None
    if values is None:
        return part
    name = hashlib.sha256(values.tobytes()).hexdigest()[:16]
    arrays[name] = values
    return {_TENSOR: name}


def _values(text: str, d_model: int) -> np.ndarray | None:
    """The vector that a text packs; None if it packs none."""
    if len(text) != 4 * -(-4 * d_model // 3):
        return None
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    values = np.frombuffer(data, dtype="<f4") if len(data) == 4 * d_model else None
    return values if values is not None and pack(torch.from_numpy(values.copy())) == text else None


def _placed(part: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """JSON with the arrays put back where they were."""
    if isinstance(part, list):
        return [_placed(value, arrays) for value in part]
    if not isinstance(part, dict):
        return part
    if part.keys() != {_TENSOR}:
        return {key: _placed(value, arrays) for key, value in part.items()}
    values = arrays.get(str(part[_TENSOR]))
    if values is None or values.dtype != np.float32 or values.ndim != 1:
        raise PlanError(
            f"A plan names the vector {part[_TENSOR]!r:.40}, and no float32 vector of that name came along."
        )
    return pack(torch.from_numpy(values.copy()))
