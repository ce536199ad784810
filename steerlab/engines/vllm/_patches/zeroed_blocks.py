"""Wraps `get_kv_cache_configs` of `vllm.v1.core`, and `KVCacheConfig.needs_kv_cache_zeroing`.

Attention reads whole cache blocks and gives what lies beyond a sequence's end the weight 0, and 0 · NaN is NaN: one row
whose stream overflowed would reach every later request that is given one of its blocks. vLLM can fill blocks with zeros
when it hands them out, which it needs for some kinds of models; here it does so for every model that is steered. What a
row left in a block that the prefix cache still names stays as it is: whoever asks for the same tokens under the same
edits then gets the same error.
"""

from collections.abc import Callable
from typing import Any

from steerlab.engines.vllm._patches.replacing import replace_function
from steerlab.engines.vllm._patches.touched import module_of
from steerlab.engines.vllm._wire.config import SteeringConfig

_IMPORTERS = ("vllm.v1.engine.core",)
_MARK, _STEERED = "_steerlab_installed", "_steerlab_steered"


def install(version: str) -> None:
    """Patches function and class; a second call changes nothing."""
    name = "get_kv_cache_configs"
    replace_function(module_of(name, version), name, _IMPORTERS, _marking)
    from vllm.v1.kv_cache_interface import KVCacheConfig

    original = KVCacheConfig.needs_kv_cache_zeroing.fget
    if original is None or hasattr(original, _MARK):
        return

    def needs_kv_cache_zeroing(self: Any) -> bool:
        return _STEERED in self.__dict__ or original(self)

    setattr(needs_kv_cache_zeroing, _MARK, True)
    KVCacheConfig.needs_kv_cache_zeroing = property(needs_kv_cache_zeroing)  # pyright: ignore[reportAttributeAccessIssue]


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    """The configurations travel to scheduler and workers with their mark."""

    def get_kv_cache_configs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(vllm_config, *args, **kwargs)
        if SteeringConfig.of(vllm_config) is not None:
            for config in found:
                setattr(config, _STEERED, True)
        return found

    return get_kv_cache_configs
