"""The engine on vLLM: the same plans inside its compiled graphs, per request.

A folder is a process: `client` and `server` run in the caller's, `worker` in vLLM's workers; `wire` is what travels
between them, and `patches` is what `plugin` replaces in vLLM. vLLM loads the plugin in each of its processes, so
importing this package loads nothing more.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steerlab.engines.vllm._sequence_prob import SequenceProb
    from steerlab.engines.vllm.adopting import vllm_config
    from steerlab.engines.vllm.engine import VLLMEngine
    from steerlab.engines.vllm.repcontrol import RepControl

_MODULES = {
    "vllm_config": "steerlab.engines.vllm.adopting",
    "RepControl": "steerlab.engines.vllm.repcontrol",
    "SequenceProb": "steerlab.engines.vllm._sequence_prob",
    "VLLMEngine": "steerlab.engines.vllm.engine",
}

__all__ = ["RepControl", "SequenceProb", "VLLMEngine", "vllm_config"]


def __getattr__(name: str) -> Any:
    """Loads a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
