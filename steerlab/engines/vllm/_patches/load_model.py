"""Replaces `vllm.v1.worker.gpu_worker.Worker.load_model`, and adds the method `steerlab` to that class.

The CPU worker inherits from it, and both model runners are loaded through it, before anything is compiled, profiled
or captured. The replacement calls the original and then wires the model, if the configuration asks for it.
"""

import functools
from typing import Any

from steerlab.engines.vllm._wire.config import SteeringConfig, is_ours
from steerlab.engines.vllm._wire.packets import METHOD
from steerlab.engines.vllm._wire.shutdown import end_quickly

_MARK = "_steerlab_installed"


def install() -> None:
    """Patches the class; a second call changes nothing."""
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker, _MARK, False):
        return
    original = Worker.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_ours(self.vllm_config):
            end_quickly()
        config = SteeringConfig.of(self.vllm_config)
        if config is not None:
            from steerlab.engines.vllm._worker.wiring import wire

            wire(self, config)

    Worker.load_model = load_model  # pyright: ignore[reportAttributeAccessIssue]
    setattr(Worker, METHOD, _answer)
    setattr(Worker, _MARK, True)


def _answer(self: Any, command: str, payload: bytes = b"") -> bytes:
    """Carries out a command of the engine in this worker; see `steerlab.engines.vllm._worker.commands`."""
    from steerlab.engines.vllm._worker.commands import answer

    return answer(self, command, payload)
