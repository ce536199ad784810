"""Wraps what `get_request_block_hasher` in `vllm.v1.core.kv_cache_utils` returns (also where it was imported by name).

The scheduler's process names every block of a prompt by a hash, in Python, request by request: for hundreds of targets
of one long prompt that is most of its work. Requests that say they share a prefix take over the names of its blocks,
after their tokens have been compared. Others are named as before.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steerlab.engines.vllm._patches.block_keys import spec_of
from steerlab.engines.vllm._patches.replacing import replace_function

REMEMBERED = 64
"""Prefixes whose names are kept."""


def install() -> None:
    """Patches the modules; a second call changes nothing."""
    replace_function("vllm.v1.core.kv_cache_utils", "get_request_block_hasher", ("vllm.v1.engine.core",), _sharing)


def _sharing(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_request_block_hasher(hash_block_size: int, *args: Any, **kwargs: Any) -> Any:
        return SharedPrefixHasher(original(hash_block_size, *args, **kwargs), hash_block_size)

    return get_request_block_hasher


@dataclass(frozen=True)
class _Known:
    """What is remembered of a shared prefix.

    Attributes:
        tokens: the prefix, cut to whole blocks.
        salt: of their cache.
        hashes: names of the whole blocks in it.
    """

    tokens: list[int]
    salt: str | None
    hashes: list[Any]


class SharedPrefixHasher:
    """Names those blocks of a request that have no name yet, and remembers the first request of every shared prefix.

    Args:
        original: vLLM's own.
        block_size: tokens that a name covers.
    """

    def __init__(self, original: Callable[[Any], list[Any]], block_size: int) -> None:
        self._original, self._block_size = original, block_size
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def __call__(self, request: Any) -> list[Any]:
        """The names, in order of the blocks."""
        request._block_hasher = self._original  # names those of later blocks, and is asked after every token
        spec = None if request.block_hashes else spec_of(request)
        if spec is None or spec.prefix is None:
            return self._original(request)
        name, count = spec.prefix
        known = self._known.get(name)
        if known is None:
            return self._first(request, name, count)
        if request.cache_salt == known.salt and request.prompt_token_ids[: len(known.tokens)] == known.tokens:
            request.block_hashes.extend(known.hashes)  # vLLM's own goes on after these
        return self._original(request)

    def _first(self, request: Any, name: str, count: int) -> list[Any]:
        found = self._original(request)
        n_blocks = min(count // self._block_size, len(found))
        tokens = list(request.prompt_token_ids[: n_blocks * self._block_size])
        self._known[name] = _Known(tokens, request.cache_salt, found[:n_blocks])
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found
