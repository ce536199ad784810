"""Replaces `generate_block_hash_extra_keys` in `vllm.v1.core.kv_cache_utils` (and where it was imported by name).

A cache block's identity then says which edits act on which of its tokens. Blocks before a request's first edited
position stay what they are for unsteered requests; blocks that an edit touches are shared only with requests that make
the same edits at the same positions. Requests without steering keep the identity that vLLM gives them, also
those that carry something under our name which is not ours: the scheduler of an engine without steering gets it too.
"""

from collections.abc import Callable
from typing import Any

from steerlab.engines.vllm._patches.replacing import replace_function
from steerlab.engines.vllm._wire.request_spec import RequestSpec

_IMPORTERS = ("vllm.v1.core.block_pool", "vllm.v1.simple_kv_offload.manager")
_PARSED, _EDITING = "_steerlab_spec", "_steerlab_editing"


def install() -> None:
    """Patches the modules; a second call changes nothing."""
    replace_function("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", _IMPORTERS, _with_steering)


def _with_steering(original: Callable[..., Any]) -> Callable[..., Any]:
    def with_steering(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
        found = original(request, start_token_idx, end_token_idx, start_mm_idx)
        if request.__dict__.get(_EDITING, request) is None:  # a long prompt has a great many blocks
            return found
        ours = block_key(request, start_token_idx, end_token_idx)
        if ours is None:
            return found
        keys, next_mm = found
        return (*(keys or ()), ("steerlab", ours)), next_mm

    return with_steering


def block_key(request: Any, start: int, stop: int) -> str | None:
    """What steering adds to the identity of the block of tokens start ≤ position < stop; None if nothing acts there.

    Each block names the edits inside it only: its predecessors are part of its identity already.
    """
    kept = request.__dict__
    if _EDITING not in kept:  # most requests edit nothing
        spec = spec_of(request)
        kept[_EDITING] = spec if spec is not None and spec.groups else None
    editing = kept[_EDITING]
    return None if editing is None else editing.key_between(start, stop)


def spec_of(request: Any) -> RequestSpec | None:
    """What a scheduler's request carries under our name; None if that is nothing, or not ours."""
    kept = request.__dict__
    if _PARSED not in kept:
        kept[_PARSED] = RequestSpec.of(request.sampling_params)
    return kept[_PARSED]
