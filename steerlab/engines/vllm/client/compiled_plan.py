"""A plan as the workers' custom operator takes it: directions and parameters per wired layer, positions per request.

One formula carries every operator that can run here, for the directions of a layer in turn, each seeing the result of
the one before: x ← x + s·[a + g·(clip(u·x, lo, hi) − u·x)]·u.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from steerlab.core.errors import PlanError
from steerlab.core.hook_points import HookPoint
from steerlab.engines.vllm.wire.config import SteeringConfig
from steerlab.steering.operators.edit import Edit
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import Where

Label: TypeAlias = tuple[str, int, str, str | None]


@dataclass(frozen=True)
class CompiledPlan:
    """A plan's edits in the operator's terms; entry e belongs to the plan's edit e.

    Attributes:
        fingerprint: content hash of everything below but `wheres` and `labels`.
        layers: the layer after which each edit acts.
        places: its place among the directions of that layer.
        groups: which of `wheres` holds its positions.
        units: unit directions, float32 [edits, d_model].
        params: a, g, lo, hi and s of each, float32 [edits, 5].
        wheres: the plan's distinct sets of positions.
        labels: hook point, layer, operator and vector of each edit, as receipts name them.
    """

    fingerprint: str
    layers: tuple[int, ...]
    places: tuple[int, ...]
    groups: tuple[int, ...]
    units: np.ndarray
    params: np.ndarray
    wheres: tuple[Where, ...]
    labels: tuple[Label, ...] = ()


def compile_plan(plan: Plan, config: SteeringConfig) -> CompiledPlan:
    """The plan for a wired engine.

    Args:
        plan: with its doses resolved.
        config: what is wired.

    Raises:
        PlanError: for an edit at a layer or site that is not wired, an operator that the formula cannot express, or
            more directions at one layer than there is room for; the message names what to change.
    """
    layers = tuple(wired_layer(edit.hook_point, config) for edit in plan)
    places = _places(plan, layers)
    _check_room(layers, config)
    wheres = tuple(dict.fromkeys(edit.where for edit in plan))
    groups = tuple(wheres.index(edit.where) for edit in plan)
    units = np.stack([edit.vector.unit.numpy() for edit in plan]).astype(np.float32)
    params = np.array([_formula(edit) for edit in plan], dtype=np.float32)
    fingerprint = _fingerprint([layers, places, groups], units, params)
    labels = tuple(map(_label, plan))
    return CompiledPlan(fingerprint, layers, places, groups, units, params, wheres, labels)


def wired_layer(point: HookPoint, config: SteeringConfig) -> int:
    """The layer whose output is the stream at a hook point.

    Raises:
        PlanError: if that layer is not wired, or the site is inside a layer.
    """
    if point.site not in ("resid_post", "resid_pre") or (point.site == "resid_pre" and point.layer == 0):
        raise PlanError(
            f"{point.name} cannot be reached inside vLLM, which steers the stream between layers: resid_post of any "
            "wired layer, or resid_pre of a layer after a wired one. Use the TransformerLens engine for other sites."
        )
    layer = point.layer if point.site == "resid_post" else point.layer - 1
    if layer not in config.layers:
        needed = sorted({*config.layers, layer})
        raise PlanError(
            f"{point.name} is not wired: this engine was started with layers={list(config.layers)}. Start it with "
            f"layers={needed}."
        )
    return layer


def _places(plan: Plan, layers: Sequence[int]) -> tuple[int, ...]:
    """Directions of one layer in the order they act: all of its resid_post, then the next layer's resid_pre."""
    order = sorted(range(len(layers)), key=lambda e: (layers[e], plan.edits[e].hook_point.site == "resid_pre", e))
    taken: dict[int, int] = {}
    places = [0] * len(layers)
    for edit in order:
        places[edit] = taken.setdefault(layers[edit], 0)
        taken[layers[edit]] += 1
    return tuple(places)


def _check_room(layers: Sequence[int], config: SteeringConfig) -> None:
    for layer in dict.fromkeys(layers):
        wanted = layers.count(layer)
        if wanted > config.max_directions:
            raise PlanError(
                f"The plan has {wanted} edits after layer {layer}; this engine was started with "
                f"max_directions={config.max_directions}. Start it with max_directions={wanted}."
            )


def _label(edit: Edit) -> Label:
    return edit.hook_point.name, edit.hook_point.layer, edit.operator.told(edit.scale), edit.vector.name


def _formula(edit: Edit) -> tuple[float, ...]:
    try:
        return edit.formula()
    except PlanError as error:
        raise PlanError(f"{edit} cannot run inside vLLM: {error} Use the TransformerLens engine for it.") from error


def _fingerprint(parts: Any, units: np.ndarray, params: np.ndarray) -> str:
    digest = hashlib.sha256(repr(parts).encode())
    digest.update(units.tobytes())
    digest.update(params.tobytes())
    return digest.hexdigest()[:32]
