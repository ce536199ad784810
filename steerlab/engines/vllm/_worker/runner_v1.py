"""The V1 runner (CPU): tells the steering state, before each pass, which requests it holds and where they are.

Wraps `_prepare_inputs` of the runner's instance: after it, the batch is in its final order, and its counts are known.
Wraps `_get_prompt_logprobs_dict`, which the last pipeline stage calls after every pass with its hidden states, and
`sample` of its sampler, whose last step then returns the logits that it drew the tokens from.
Wraps `sample` and `_bookkeeping_sync` once more, to count the rows whose logits are not finite, and replaces
`_zero_block_ids`, which on a CPU leaves out layers with a sliding window.
V1 moves requests between rows of its batch, so slots are our own here; a request that a pass leaves out gives its slot
back and takes one again later.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.engines.vllm._worker.measuring import Measuring
from steerlab.engines.vllm._worker.steering_state import SteeringState
from steerlab.measures.log_probs import rows_not_finite


def connect(runner: Any, state: SteeringState) -> None:
    """Wraps the runner's instance."""
    table = SlotTable(runner, state)
    original = runner._prepare_inputs

    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        result = original(scheduler_output, num_scheduled_tokens)
        table.begin(num_scheduled_tokens)
        return result

    runner._prepare_inputs = prepare_inputs
    if state.measuring is not None:
        _measure(runner, table, state.measuring)
    _count_failed(runner)
    if runner.device.type == "cpu":
        runner._zero_block_ids = functools.partial(_zero_blocks, runner)


def _count_failed(runner: Any) -> None:
    """Reports rows whose logits are not finite, as vLLM's own count of NaN is reported."""
    sample, bookkeeping = runner.sampler.sample, runner._bookkeeping_sync
    failed: list[Tensor] = []

    def sample_and_count(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        counts = rows_not_finite(logits).int()  # before penalties and masks
        failed[:] = [counts]
        with _drawn_again(sampling_metadata.generators, counts):
            return sample(logits, sampling_metadata, *args, **kwargs)

    def bookkeeping_sync(*args: Any, **kwargs: Any) -> Any:
        _, _, *rest = bookkeeping(*args, **kwargs)
        counts = failed.pop() if failed else None
        if runner.use_async_scheduling or counts is None:
            return {}, counts, *rest
        rows = runner.input_batch.req_id_to_index
        found = counts.tolist()
        return {name: found[row] for name, row in rows.items() if row < len(found)}, None, *rest

    runner.sampler.sample = sample_and_count
    runner._bookkeeping_sync = bookkeeping_sync


@contextlib.contextmanager
def _drawn_again(generators: dict[int, torch.Generator], failed: Tensor) -> Iterator[None]:
    """A failed row loses its token and may run once more: its generator goes back to before the draw.

    Where logits are on a GPU this is left out, because looking at them would wait for it.
    """
    rows = failed.nonzero().flatten().tolist() if generators and failed.device.type == "cpu" else []
    states = {row: generators[row].get_state() for row in rows if row in generators}
    yield
    for row, state in states.items():
        generators[row].set_state(state)


def _zero_blocks(runner: Any, block_ids: list[int]) -> None:
    """Fills cache blocks with zeros; a block belongs to one request in all layers."""
    layers = runner.compilation_config.static_forward_context.values()
    caches = [getattr(layer, "kv_cache", None) for layer in layers]  # layers of experts have none
    tensors = {cache.data_ptr(): cache for cache in caches if isinstance(cache, Tensor) and cache.numel()}
    blocks = torch.tensor(block_ids)
    for cache in tensors.values():
        cache.index_fill_(0, blocks, 0)


def _measure(runner: Any, table: "SlotTable", measuring: Measuring) -> None:
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
        measuring.draw(table.order, drawn_from, tokens)
        return tokens, None

    runner._get_prompt_logprobs_dict = get_prompt_logprobs_dict
    runner.sampler.sample = sample_and_measure


class SlotTable:
    """Which request sits in which slot."""

    def __init__(self, runner: Any, state: SteeringState) -> None:
        self._runner, self._state = runner, state
        self._slots: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self.order = np.zeros(0, dtype=np.int64)
        self._free = list(range(state.tables.counts.shape[1]))[::-1]

    def begin(self, lengths: np.ndarray) -> None:
        """States what the coming pass holds: the batch as it is now, with so many tokens of each request."""
        batch = self._runner.input_batch
        names = batch.req_ids[: batch.num_reqs]
        for name in set(self._slots) - set(names):
            self._leave(name)
        for name in names:
            self._enter(name)
        self.order = slots = np.array([self._slots[name] for name in names])
        starts, ids = batch.num_computed_tokens_cpu[: len(names)], self._runner.input_ids.gpu[: int(lengths.sum())]
        self._state.begin(slots, starts.astype(np.int64), lengths.astype(np.int64), ids)

    def _enter(self, name: str) -> None:
        """Gives a request a slot; the same name with another request behind it is a new one."""
        request = self._runner.requests[name]
        if self._requests.get(name) is request:
            return
        self._leave(name)
        self._slots[name], self._requests[name] = self._free.pop(), request
        spec = RequestSpec.of(request.sampling_params)
        self._state.enter(
            self._slots[name], spec, lambda: [*(request.prompt_token_ids or ()), *request.output_token_ids]
        )

    def _leave(self, name: str) -> None:
        if name in self._slots:
            slot = self._slots.pop(name)
            del self._requests[name]
            self._state.leave(slot)
            self._free.append(slot)
