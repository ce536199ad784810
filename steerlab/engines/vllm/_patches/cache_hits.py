"""Wraps `KVCacheManager.get_computed_blocks` in `vllm.v1.core.kv_cache_manager`.

A position that is read from the prefix cache is not run, so what it predicts cannot be scored, and no condition can
read it. Here the hit of a request that is scored ends before its first scored position, and before the first position
that a condition reads: from 0.33 on the manager takes a limit for that; before, it looks for a hit as if the prompt
ended there, whatever kinds of cache groups the model has. All other requests are looked up as before.
"""

import functools
import inspect
from typing import Any

from steerlab.engines.vllm._patches.block_keys import spec_of

_MARK = "_steerlab_installed"


def install() -> None:
    """Patches the class; a second call changes nothing."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    original = KVCacheManager.get_computed_blocks
    if getattr(original, _MARK, False):
        return

    takes_limit = "max_cache_hit_length" in inspect.signature(original).parameters
    replacement = functools.wraps(original)(_with_limit(original) if takes_limit else _as_if_shorter(original))
    setattr(replacement, _MARK, True)
    KVCacheManager.get_computed_blocks = replacement


def _as_if_shorter(original: Any) -> Any:
    def get_computed_blocks(self: Any, request: Any) -> Any:
        limit = longest_hit(request)
        return original(self, request if limit is None else _Shorter(request, limit))

    return get_computed_blocks


def _with_limit(original: Any) -> Any:
    def get_computed_blocks(self: Any, request: Any, max_cache_hit_length: int | None = None) -> Any:
        limits = [limit for limit in (longest_hit(request), max_cache_hit_length) if limit is not None]
        return original(self, request, min(limits, default=None))

    return get_computed_blocks


def longest_hit(request: Any) -> int | None:
    """How many tokens of a request may come from the cache; None if vLLM's own limit holds."""
    spec = spec_of(request)
    if spec is None:
        return None
    needed = [position for position in (spec.score and spec.score.start, spec.first_read) if position is not None]
    first = min(needed, default=request.num_tokens)
    return first if first + 1 < request.num_tokens else None


class _Shorter:
    """A request whose last token, which the manager always leaves to be run, is its first scored one."""

    def __init__(self, request: Any, limit: int) -> None:
        self._request = request
        self.num_tokens = limit + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
