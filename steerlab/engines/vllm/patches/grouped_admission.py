"""Wraps `add_request` and `abort_requests` of `EngineCore` in `vllm.v1.engine.core`.

The scheduler starts on the first request that arrives. The thread that receives the others then shares one interpreter
with the one that launches kernels, each slows the other down, and a call begins with a pass of one request that takes
as long as a full one. Requests that say they belong to a group are kept until all of it has arrived, and are handed to
the scheduler together. Others go there at once, as before.

Fits vLLM 0.32.
"""

import functools
from typing import Any

from steerlab.engines.vllm.patches.block_keys import spec_of

_MARK, _WAITING = "_steerlab_installed", "_steerlab_waiting"


def install() -> None:
    """Patches the class; a second call changes nothing."""
    from vllm.v1.engine.core import EngineCore

    add, abort = EngineCore.add_request, EngineCore.abort_requests
    if getattr(add, _MARK, False):
        return

    @functools.wraps(add)
    def add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        spec = spec_of(request)
        if spec is None or spec.group is None:
            add(self, request, request_wave)
            return
        name, size = spec.group
        waiting = _waiting(self).setdefault(name, [])
        waiting.append((request, request_wave))
        if len(waiting) >= size:
            _release(self, name)

    @functools.wraps(abort)
    def abort_requests(self: Any, request_ids: list[str]) -> None:
        for name, waiting in list(_waiting(self).items()):
            if any(request.request_id in request_ids for request, _ in waiting):
                _release(self, name)  # some of it will never come
        abort(self, request_ids)

    def _release(self: Any, name: str) -> None:
        for arrived in _waiting(self).pop(name):
            add(self, *arrived)

    setattr(add_request, _MARK, True)
    EngineCore.add_request = add_request
    EngineCore.abort_requests = abort_requests


def _waiting(core: Any) -> dict[str, list[tuple[Any, int]]]:
    """What an engine keeps back, by group."""
    return core.__dict__.setdefault(_WAITING, {})
