"""The engine and the plan that arguments name, as other packages' command lines pass them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steerlab.core._numbers import as_number
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.engines._wired_points import wiring_for
from steerlab.engines.loading import BACKENDS, load
from steerlab.steering.operators import add
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where as positions
from steerlab.steering.vectors import VectorSet

PLAN = ("plan", "scale", "vector", "layer", "dose", "coef", "where")
"""The arguments that make a plan."""

_PLACES = ("default", "all", "prompt", "last_prompt", "generated")


def take_plan(arguments: dict[str, Any]) -> Plan | None:
    """The plan that arguments make, which are taken out of them; None without any.

    Args:
        arguments: `plan`, a file with what `Plan.to_json` gives, or that itself, and `scale`, which multiplies it; or
            `vector`, a file, with `layer`, `dose` or `coef`, and `where`.

    Raises:
        InputError: for arguments that do not go together, or a file that cannot be read.
    """
    stated = {name: arguments.pop(name) for name in PLAN if name in arguments}
    stated = {name: value for name, value in stated.items() if value is not None}
    source = next((name for name in ("plan", "vector") if name in stated), None)
    allowed = {"plan": ("plan", "scale"), "vector": PLAN[2:], None: ()}[source]
    extra = [name for name in stated if name not in allowed]
    if extra:
        needed = "plan=FILE" if extra == ["scale"] else "vector=FILE, the vector to steer with"
        beside = f", and there is {source}=" if source else ""
        raise InputError(f"The argument {', '.join(extra)} needs {needed}{beside}.")
    if source is None:
        return None
    return _read_plan(**stated) if source == "plan" else _addition(**stated)


def _read_plan(plan: Any, scale: Any = 1.0) -> Plan:
    factor = as_number(scale)
    if factor is None:
        raise InputError(f"scale is a number, got {scale!r:.40}.")
    if isinstance(plan, Mapping):
        return Plan.from_json(json.dumps(plan)).scaled(factor)
    try:
        text = Path(plan).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise InputError(f"plan is a file with what Plan.to_json gives; cannot read {plan!r:.120}: {error}.") from error
    return Plan.from_json(text).scaled(factor)


def _addition(vector: Any, layer: Any = None, dose: Any = None, coef: Any = None, where: Any = None) -> Plan:
    vectors = VectorSet.load(vector)
    if layer is None and len(vectors) > 1:
        raise InputError(f"{vector} holds vectors for the layers {', '.join(map(str, vectors))}; set layer.")
    chosen = vectors.by_layer[0] if layer is None else vectors[int(layer)]
    if where not in (None, *_PLACES):
        raise InputError(f"where={where!r:.40} names no positions; those with a name are {', '.join(_PLACES)}.")
    return Plan(add(chosen, dose=dose, coef=coef, where=getattr(positions, where or "default")()))


def engine_of(model: str, plan: Plan | None, arguments: dict[str, Any]) -> Engine:
    """A model ready to run a plan.

    Args:
        model: as in `sl.load`.
        plan: what has to be wired where vLLM runs it.
        arguments: `engine`, `lens` (the default) or `vllm`, and arguments of that engine.

    Raises:
        InputError: for another engine.
    """
    options = dict(arguments)
    kind = options.pop("engine", "lens")
    if kind not in BACKENDS:
        raise InputError(f"engine is {' or '.join(BACKENDS)}, got engine={kind!r:.40}.")
    loading: Any = load
    return loading(model, backend=kind, **{**(wiring_for(plan) if kind == "vllm" else {}), **options})
