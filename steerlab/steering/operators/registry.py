"""Operators by the kind that names them in the JSON of a plan: shipped ones, and users' own."""

import json
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError, SteerlabError, UnknownOperatorError
from steerlab.steering.operators._base import Operator

OperatorReader: TypeAlias = Callable[[dict[str, Any], HookPoint], Operator]


SHIPPED_OPERATORS: Final[dict[str, type[Any]]] = {}
"""The operators of this package by kind; `steerlab.steering.operators` fills it."""
_READERS: dict[str, OperatorReader] = {}


def is_shipped(operator: Operator) -> bool:
    """Whether it is an operator of this package rather than a user's own."""
    return type(operator) in SHIPPED_OPERATORS.values()


def check_operator(operator: object) -> None:
    """Checks that an object is an operator whose description identifies it.

    Raises:
        PlanError: for a class, something else than an operator, no unit, or a description that cannot identify it.
    """
    if isinstance(operator, type):
        raise PlanError(
            f"An edit takes an operator, got the class {operator.__name__} itself; make one of it: "
            f"{operator.__name__}(…)."
        )
    if not isinstance(operator, Operator):
        raise PlanError(f"An edit takes an operator such as sl.add(v, dose=0.2).operator, got {operator!r:.60}.")
    if is_shipped(operator):
        return
    name = type(operator).__name__
    if getattr(operator, "unit", None) not in ("dose", "coef"):
        raise PlanError(
            f"The operator {name} needs a unit, 'dose' if its numbers are in median norms, else 'coef'; got "
            f"{getattr(operator, 'unit', None)!r:.60}."
        )
    found = operator.to_json()
    kind = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(kind, str) or not kind:
        raise PlanError(
            f"to_json of the operator {name} gives a dict with a non-empty text 'kind', such as "
            f"{{'kind': {name.lower()!r}}}; got {found!r:.60}."
        )
    if kind in SHIPPED_OPERATORS:
        raise PlanError(
            f"to_json of the operator {name} gives the kind {kind!r}, which is an operator of this package; give "
            "another kind."
        )
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise PlanError(f"to_json of the operator {name} gives what is no JSON: {error}.") from error


def register_operator(kind: str, read: OperatorReader) -> None:
    """Registers how an operator of your own is read from plans; an earlier one of that kind is replaced.

    A plan is built and run without it. It is needed wherever a plan is read back: `Plan.from_json`, an experiment that
    is resumed, loaded, verified or compared. Every process that reads registers first.

    Args:
        kind: what the operator's `to_json` gives as `kind`.
        read: from that description, and the hook point of the edit, to the operator. `to_json` of what it returns must
            give the same description again.

    Raises:
        PlanError: for the kind of a shipped operator, or something that is no function.

    Examples:
        >>> from steerlab.steering.operators import Ablate
        >>> class Forget(Ablate):
        ...     def to_json(self):
        ...         return {"kind": "forget"}
        >>> register_operator("forget", lambda data, hook_point: Forget())
        >>> read_registered({"kind": "forget"}, HookPoint(3, "resid_post"))
        Forget(unit='coef')
    """
    if not isinstance(kind, str) or not kind:
        raise PlanError(f"kind is the text that the operator's to_json gives as 'kind', got {kind!r}.")
    if kind in SHIPPED_OPERATORS:
        raise PlanError(f"{kind!r} is an operator of this package; give your own another kind.")
    if not callable(read):
        raise PlanError(f"register_operator takes a function from a description to an operator, got {read!r:.60}.")
    _READERS[kind] = read


def operator_from_json(data: dict[str, Any], hook_point: HookPoint = HookPoint(0, "resid_post")) -> Operator:  # noqa: B008
    """The operator that `to_json` described; its other vectors are placed at the hook point.

    Raises:
        PlanError: if the description is neither one of ours nor of an operator that was registered.
    """
    try:
        kind = data["kind"]
        if kind in SHIPPED_OPERATORS:
            return SHIPPED_OPERATORS[kind].from_json(data, hook_point)
        return read_registered(data, hook_point)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SteerlabError):
            raise
        raise PlanError(f"Not a description of an operator: {data!r:.120}.") from error


def read_registered(data: dict[str, Any], hook_point: HookPoint) -> Operator:
    """The operator that a registered function makes of a description.

    Raises:
        UnknownOperatorError: if its kind is not registered.
        PlanError: if what was registered makes something else of it.
    """
    kind = data["kind"]
    if kind not in _READERS:
        known = ", ".join([*SHIPPED_OPERATORS, *sorted(_READERS)])
        raise UnknownOperatorError(
            f"Unknown operator {kind!r}; known are {known}. If it is your own, register it before its plans are read: "
            f"sl.register_operator({kind!r}, lambda data, hook_point: …). A server imports a module that does so: "
            "`steerlab serve … --import MODULE`."
        )
    found = _READERS[kind](data, hook_point)
    if not isinstance(found, Operator):
        raise PlanError(f"What is registered for {kind!r} gave {type(found).__name__}, which is no Operator.")
    if _plain(found.to_json()) != _plain(data):
        raise PlanError(
            f"What is registered for {kind!r} made {found} of {data!r:.120}, which describes itself as "
            f"{found.to_json()!r:.120}; reading must give back what was written."
        )
    return found


def _plain(data: Any) -> str:
    return json.dumps(data, sort_keys=True)
