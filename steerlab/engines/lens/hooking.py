"""Hooks on a TransformerLens model that are ours alone: added once, removed always, and heard from."""

import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from steerlab.core.errors import HookPointError

HookFunction = Callable[..., Any]

_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """Runs the body while no other thread is in such a body of this model.

    A hook on a model acts on every pass of it, whichever thread makes the pass, so that another's call would be edited
    and read too.
    """
    with _locks_guard:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


def hook_points(bridge: Any) -> dict[str, Any]:
    """Every hook point of a model by canonical name and, on a bridge, by alias; collected once."""
    if "_steerlab_hook_points" not in bridge.__dict__:
        bridge.__dict__["_steerlab_hook_points"] = dict(bridge.hook_dict)
    return bridge.__dict__["_steerlab_hook_points"]


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
    handles: list[tuple[Any, Any]] = []
    with all_heard(hooks) as listening:
        try:
            for point, (_, function) in zip(points, listening, strict=True):
                handles.append((point, point.add_hook(function)))
            yield
        finally:
            for point, handle in handles:
                handle.hook.remove()
                point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]


@contextmanager
def all_heard(hooks: Sequence[tuple[str, HookFunction]]) -> Iterator[list[tuple[str, HookFunction]]]:
    """Gives the same hooks to attach in the body, each of which must fire there.

    Raises:
        HookPointError: after the body, for hook points that never fired.
    """
    fired = [False] * len(hooks)

    def listening(index: int, function: HookFunction) -> HookFunction:
        def hook(value: Any, hook: Any) -> Any:
            fired[index] = True
            return function(value, hook=hook)

        return hook

    yield [(name, listening(index, function)) for index, (name, function) in enumerate(hooks)]
    silent = [name for (name, _), heard in zip(hooks, fired, strict=True) if not heard]
    if silent:
        raise HookPointError(f"These hook points never fired on this model: {', '.join(sorted(set(silent)))}.")
