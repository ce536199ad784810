"""Hook points of a TransformerLens model, and hooks on them: found by name, added once, removed always."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from steerlab._runtime.hooks import HookFunction, require_fired
from steerlab._runtime.model_state import remembered
from steerlab.core.errors import HookPointError


def hook_points(bridge: Any) -> dict[str, Any]:
    """Every hook point of a model by canonical name and, on a bridge, by alias; collected once."""
    return remembered(bridge, "hook points", lambda: dict(bridge.hook_dict))


def find_hook_point(bridge: Any, name: str) -> Any:
    """The model's hook point of this name; a bridge's aliases lead to the one point they stand for.

    Raises:
        HookPointError: if the model has none, or it cannot fire as the model is set up; names the nearest ones.
    """
    points = hook_points(bridge)
    point = points.get(name)
    if point is None:
        near = difflib.get_close_matches(name, list(points), n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise HookPointError(f"The model has no hook point {name!r}.{hint}")
    try:
        bridge.check_hooks_to_add(point, name, lambda value, hook: None)
    except Exception as error:
        raise HookPointError(f"The hook point {name!r} cannot fire on this model: {error}") from error
    return point


@contextmanager
def attached(bridge: Any, hooks: Sequence[tuple[str, HookFunction]]) -> Iterator[None]:
    """Runs the body with forward hooks, called as `fn(value, hook=point)`, in the order given.

    Hooks that were there before stay, also when the body raises; ours are gone either way.

    Raises:
        HookPointError: for an unknown hook point before the body runs, or after it for one that never fired.
    """
    points = [find_hook_point(bridge, name) for name, _ in hooks]
    with require_fired(hooks) as listening, ExitStack() as stack:
        for point, (_, function) in zip(points, listening, strict=True):
            stack.callback(add_hook(point, function))
        yield


def add_hook(point: Any, function: HookFunction) -> Callable[[], None]:
    """Puts a hook on a hook point. What is returned takes it off again, and no other."""
    handle = point.add_hook(function)

    def remove() -> None:
        handle.hook.remove()
        point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]

    return remove
