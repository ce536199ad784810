"""Caches of facts about a model, kept outside the model for as long as it lives.

A copy or a pickle of a model carries nothing of it. What is remembered must not refer to the model it is about: an
entry dies with its model only if the model is not reachable from it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


@dataclass
class ModelState:
    """What is known of one model.

    Attributes:
        lock: held by the thread whose hooks are on the model, or whose parameters are in it for a call.
        known: what was found out, by name.
    """

    lock: Any = field(default_factory=threading.RLock)
    known: dict[str, Any] = field(default_factory=dict)


_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_guard = threading.Lock()


def state_of(model: Any) -> ModelState:
    """The state of a model, the same as long as the model lives."""
    with _guard:
        return _states.setdefault(model, ModelState())


def share_lock(model: Any, other: Any) -> None:
    """Lets one lock be held for both models: for parameters that both hold, and that a call may replace meanwhile."""
    state_of(model).lock = state_of(other).lock


def forget(model: Any) -> None:
    """Drops all that is known of a model: it has become another."""
    state_of(model).known.clear()


def remembered(model: Any, name: str, make: Callable[[], T]) -> T:
    """What is known of a model under a name; `make` finds it out the first time."""
    known = state_of(model).known
    if name not in known:
        known[name] = make()
    return known[name]
