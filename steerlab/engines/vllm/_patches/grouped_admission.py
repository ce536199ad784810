"""Wraps `add_request`, `abort_requests` and `pause_scheduler` of `EngineCore` in `vllm.v1.engine.core`.

The scheduler starts on the first request that arrives. The thread that receives the others then shares one interpreter
with the one that launches kernels, each slows the other down, and a call begins with a pass of one request that takes
as long as a full one. Requests that say they belong to a group are kept until all of it has arrived, and are handed to
the scheduler together. Others go there at once, as before.

What is kept must not wait for ever. From 0.33 on an engine whose generation is paused refuses requests before they get
here (`EngineCoreProc._reject_add_while_paused`, wrapped too): a refused one counts as arrived. Where one of a group is
aborted, or generation is paused, what has arrived goes to the scheduler, which then aborts or keeps it as any other,
and what comes later of the group goes there at once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from steerlab.engines.vllm._patches.block_keys import spec_of

_MARK, _GROUPS = "_steerlab_installed", "_steerlab_groups"


@dataclass
class _Group:
    """Requests that are admitted together.

    Attributes:
        to_come: how many have not arrived.
        kept: those that have, with their waves.
        is_open: whether what comes goes to the scheduler at once.
    """

    to_come: int
    kept: list[tuple[Any, int]] = field(default_factory=list)
    is_open: bool = False


def install() -> None:
    """Patches the classes; a second call changes nothing."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if getattr(EngineCore.add_request, _MARK, False):
        return
    groups = Groups(EngineCore.add_request)
    EngineCore.add_request = groups.adding()
    EngineCore.abort_requests = groups.aborting(EngineCore.abort_requests)
    for owner in (EngineCore, EngineCoreProc):  # each has its own
        owner.pause_scheduler = groups.pausing(owner.pause_scheduler)
    if hasattr(EngineCoreProc, "_reject_add_while_paused"):
        rejecting = groups.rejecting(EngineCoreProc._reject_add_while_paused)  # pyright: ignore[reportAttributeAccessIssue]
        EngineCoreProc._reject_add_while_paused = rejecting  # pyright: ignore[reportAttributeAccessIssue]


class Groups:
    """Replacements of the engine's methods.

    Args:
        add: the engine's own `add_request`.
    """

    def __init__(self, add: Callable[..., None]) -> None:
        self._add = add

    def adding(self) -> Callable[..., None]:
        """Replaces `add_request`."""

        @functools.wraps(self._add)
        def add_request(core: Any, request: Any, request_wave: int = 0) -> None:
            group = self._arrived(core, request)
            if group is None or group.is_open:
                self._add(core, request, request_wave)
                return
            group.kept.append((request, request_wave))
            self._release_if_whole(core, group)

        setattr(add_request, _MARK, True)
        return add_request

    def aborting(self, abort: Callable[..., None]) -> Callable[..., None]:
        """Replaces `abort_requests`."""

        @functools.wraps(abort)
        def abort_requests(core: Any, request_ids: list[str]) -> None:
            for group in _groups(core).values():
                if any(request.request_id in request_ids for request, _ in group.kept):
                    self._release(core, group)  # some of it will never come
            abort(core, request_ids)

        return abort_requests

    def pausing(self, pause: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces `pause_scheduler`."""

        @functools.wraps(pause)
        def pause_scheduler(core: Any, *args: Any, **kwargs: Any) -> Any:
            for group in _groups(core).values():
                self._release(core, group)
            return pause(core, *args, **kwargs)

        return pause_scheduler

    def rejecting(self, reject: Callable[..., bool]) -> Callable[..., bool]:
        """Replaces `_reject_add_while_paused`."""

        @functools.wraps(reject)
        def reject_add_while_paused(core: Any, request: Any) -> bool:
            is_rejected = reject(core, request)
            group = self._arrived(core, request) if is_rejected else None
            if group is not None:
                self._release_if_whole(core, group)
            return is_rejected

        return reject_add_while_paused

    def _arrived(self, core: Any, request: Any) -> _Group | None:
        """The group of a request that has arrived; None if it belongs to none."""
        spec = spec_of(request)
        if spec is None or spec.group is None:
            return None
        name, size = spec.group
        group = _groups(core).setdefault(name, _Group(size))
        group.to_come -= 1
        if group.to_come <= 0:
            del _groups(core)[name]
        return group

    def _release_if_whole(self, core: Any, group: _Group) -> None:
        if group.to_come <= 0:
            self._release(core, group)

    def _release(self, core: Any, group: _Group) -> None:
        kept, group.kept, group.is_open = group.kept, [], True
        for arrived in kept:
            self._add(core, *arrived)


def _groups(core: Any) -> dict[str, _Group]:
    """The groups of an engine that have not arrived as a whole, by name."""
    return core.__dict__.setdefault(_GROUPS, {})
