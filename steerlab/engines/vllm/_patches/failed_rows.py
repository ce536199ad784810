"""Wraps `update_from_output` of `Scheduler` in `vllm.v1.core.sched.scheduler`.

The runners of steered models report rows of logits that are not finite (`runner_v1`, `runner_v2`) where vLLM reports
its own count of NaN, which it carries to the scheduler. There such a request loses the token that was drawn from such
logits, and its blocks lose their names in the prefix cache: attention gives a later position of the same row the weight
0, and 0 · NaN is NaN, so one NaN may spoil what the row's earlier blocks hold, which other prompts share. A request
that may have read such a block is not to blame; so each runs once more, without the prefix cache, and only then ends
with finish_reason `error`, which vLLM's server answers with an error. Models that are not steered are left alone.
"""

import functools
import time
from typing import Any

from steerlab.engines.vllm._wire.config import SteeringConfig

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
        if not failed or SteeringConfig.of(self.vllm_config) is None:
            return original(self, scheduler_output, model_runner_output)
        again = []
        for name in failed:
            request = self.requests.get(name)
            if request is None or request.is_finished() or _is_dropped(request):
                continue
            self.kv_cache_manager.evict_blocks({i for ids in self.kv_cache_manager.get_block_ids(name) for i in ids})
            if _drop_token(request, model_runner_output) and not request.skip_reading_prefix_cache:
                again.append(request)
            else:
                self.encoder_cache_mismatch_reqs.add(name)  # what is named here ends with an error after this step
        found = original(self, scheduler_output, model_runner_output)
        for request in again:
            _run_again(self, request)
        return found

    setattr(update_from_output, _MARK, True)
    Scheduler.update_from_output = update_from_output


def _is_dropped(request: Any) -> bool:
    """Whether the step's output is from before a preemption, and will be passed over."""
    return request.drop_stale_output and request.num_stale_output_tokens > 0


def _drop_token(request: Any, output: Any) -> bool:
    """Takes the step's token away, if the request may leave the step without one."""
    params = request.sampling_params
    if params is None or params.prompt_logprobs is not None:
        return False
    if output.sampled_token_ids:
        output.sampled_token_ids[output.req_id_to_index[request.request_id]] = []
    return True


def _run_again(scheduler: Any, request: Any) -> None:
    """Sends a request back to the queue, as vLLM does when it empties its cache; it then reads nothing of the cache."""
    request.skip_reading_prefix_cache = True
    if request in scheduler.running:
        scheduler.running.remove(request)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
