"""The V1 runner (CPU): tells the steering state, before each pass, which requests it holds and where they are.

Wraps `_prepare_inputs` of the runner's instance: after it, the batch is in its final order, and its counts are known.
Wraps `_get_prompt_logprobs_dict`, which the last pipeline stage calls after every pass with its hidden states, and
`sample` of its sampler, whose last step then returns the logits that it drew the tokens from.
V1 moves requests between rows of its batch, so slots are our own here; a request that a pass leaves out gives its slot
back and takes one again later.
"""

from typing import Any

import numpy as np
from torch import Tensor

from steerlab.engines.vllm.measuring import Measuring
from steerlab.engines.vllm.specs import RequestSpec
from steerlab.engines.vllm.steering_state import SteeringState


def connect(runner: Any, state: SteeringState) -> None:
    """Wraps the runner's instance."""
    seats = _Seats(runner, state)
    original = runner._prepare_inputs

    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        result = original(scheduler_output, num_scheduled_tokens)
        seats.begin(num_scheduled_tokens)
        return result

    runner._prepare_inputs = prepare_inputs
    if state.measuring is not None:
        _measure(runner, seats, state.measuring)


def _measure(runner: Any, seats: "_Seats", measuring: Measuring) -> None:
    prompt_log_probs, sample = runner._get_prompt_logprobs_dict, runner.sampler.sample

    def get_prompt_logprobs_dict(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        measuring.score(hidden_states)
        return prompt_log_probs(hidden_states, *args, **kwargs)

    def sample_and_measure(*args: Any, **kwargs: Any) -> Any:
        if not measuring.is_drawing:
            return sample(*args, **kwargs)
        last_step = runner.sampler.topk_topp_sampler
        usual, last_step.logprobs_mode = last_step.logprobs_mode, "processed_logits"
        try:
            tokens, drawn_from = sample(*args, **kwargs)
        finally:
            last_step.logprobs_mode = usual
        measuring.draw(seats.order, drawn_from, tokens)
        return tokens, None

    runner._get_prompt_logprobs_dict = get_prompt_logprobs_dict
    runner.sampler.sample = sample_and_measure


class _Seats:
    """Which request sits in which slot."""

    def __init__(self, runner: Any, state: SteeringState) -> None:
        self._runner, self._state = runner, state
        self._slots: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self.order = np.zeros(0, dtype=np.int64)
        self._free = list(range(state.tables.counts.shape[1]))[::-1]

    def begin(self, lengths: np.ndarray) -> None:
        batch = self._runner.input_batch
        names = batch.req_ids[: batch.num_reqs]
        for name in set(self._slots) - set(names):
            self._leave(name)
        for name in names:
            self._enter(name)
        self.order = slots = np.array([self._slots[name] for name in names])
        self._state.begin(slots, batch.num_computed_tokens_cpu[: len(names)].astype(np.int64), lengths.astype(np.int64))

    def _enter(self, name: str) -> None:
        """Seats a request; the same name with another request behind it is a new one."""
        request = self._runner.requests[name]
        if self._requests.get(name) is request:
            return
        self._leave(name)
        self._slots[name], self._requests[name] = self._free.pop(), request
        self._state.enter(self._slots[name], RequestSpec.of(request.sampling_params))

    def _leave(self, name: str) -> None:
        if name in self._slots:
            slot = self._slots.pop(name)
            del self._requests[name]
            self._state.leave(slot)
            self._free.append(slot)
