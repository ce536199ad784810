"""Wraps `update_from_output` of `Scheduler` in `vllm.v1.core.sched.scheduler`.

The runners of steered models report rows of logits that are not finite (`runner_v1`, `runner_v2`) where vLLM reports
its own count of NaN, which it carries to the scheduler. There such a request ends with finish_reason `error`, without
the token that was drawn from such logits; vLLM's server answers it with an error. Models that are not steered are left
alone.
"""

import functools
from typing import Any

from steerlab.engines.vllm.config import SteeringConfig

_MARK = "_steerlab_installed"


def install() -> None:
    """Patches the class; a second call changes nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed = [name for name, count in (model_runner_output.num_nans_in_logits or {}).items() if count]
        if failed and SteeringConfig.of(self.vllm_config) is not None:
            for name in failed:
                _drop_token(self.requests.get(name), model_runner_output, name)
            self.grammar_compile_error_reqs.update(failed)  # what is named here ends with an error after this step
        return original(self, scheduler_output, model_runner_output)

    setattr(update_from_output, _MARK, True)
    Scheduler.update_from_output = update_from_output


def _drop_token(request: Any, output: Any, name: str) -> None:
    params = None if request is None else request.sampling_params
    if params is None or params.prompt_logprobs is not None:  # those leave the engine with a token, or not at all
        return
    if output.sampled_token_ids:
        output.sampled_token_ids[output.req_id_to_index[name]] = []
