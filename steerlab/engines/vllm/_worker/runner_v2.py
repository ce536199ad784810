"""Model Runner V2 (GPU): tells the steering state, before each pass, which requests it holds and where they are.

Wraps three methods of the runner's model state, on the instance: `add_request` and `remove_request`, which name the
slot a request has for as long as it runs, and `prepare_inputs`, called before every pass that is not a graph capture.
Wraps `compute_prompt_logprobs` of its prompt-logprobs worker, which the last pipeline stage calls after every pass with
its hidden states, and `sample` of its sampler, which returns the logits that it drew from (as it does for requests with
seeds of their own, which all of ours have). Replaces `get_num_nans` of its module, and has it called, and wraps
`get_output` of `AsyncOutput`, where its result arrives on the host: vLLM then carries to the scheduler which rows'
logits are not finite. Everything it needs is on the host already, also with async scheduling: without speculative
decoding the host's count of computed tokens is exact.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.engines.vllm._worker.measuring import Measuring
from steerlab.engines.vllm._worker.steering_state import SteeringState

_MARK = "_steerlab_installed"


def connect(runner: Any, state: SteeringState) -> None:
    """Wraps the runner's model state."""
    model_state, req_states = runner.model_state, runner.req_states
    add, remove, prepare = model_state.add_request, model_state.remove_request, model_state.prepare_inputs

    def add_request(req_index: int, new_req_data: Any) -> None:
        add(req_index, new_req_data)
        spec = RequestSpec.of(new_req_data.sampling_params)
        state.enter(req_index, spec, lambda: new_req_data.prefill_token_ids or ())

    def remove_request(req_id: str) -> None:
        slot = req_states.req_id_to_index.get(req_id)
        if slot is not None:
            state.leave(slot)
        remove(req_id)

    def prepare_inputs(input_batch: Any, states: Any) -> Any:
        if input_batch.num_reqs and input_batch.req_ids[0] in req_states.req_id_to_index:
            state.begin(
                input_batch.idx_mapping_np,
                input_batch.num_computed_tokens_np.astype(np.int64),
                input_batch.num_scheduled_tokens.astype(np.int64),
                input_batch.input_ids,
            )
        else:  # a dummy pass, for profiling or to keep ranks in step
            state.begin_empty()
        return prepare(input_batch, states)

    model_state.add_request = add_request
    model_state.remove_request = remove_request
    model_state.prepare_inputs = prepare_inputs
    if getattr(runner, "sampler", None) is not None:  # of pipeline stages only the last one samples
        _count_failed(runner.sampler)
    if state.measuring is not None:
        _measure(runner, state.measuring)


def _count_failed(sampler: Any) -> None:
    """Reports rows whose logits are not finite, and draws tokens of the vocabulary for them.

    From NaN the kernel may draw one beyond it. The next pass, which is under way before the scheduler hears of it,
    would look that one up, and the whole engine would die.

    The steps of a small model are bound by the host, so each launch counts: the rule is applied to the largest logits
    once they are on the host. They travel as what vLLM takes for counts, integers, by their bits.
    """
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.sample import sampler as module

    sample, get_output = sampler.sample, AsyncOutput.get_output

    def get_num_nans(logits: Tensor) -> Tensor:
        return logits.amax(dim=-1).float().view(torch.int32)  # before penalties and masks

    def sample_from_vocabulary(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens, drawn_from = sample(logits, *args, **kwargs)
        return tokens.clamp_(0, logits.shape[-1] - 1), drawn_from

    @functools.wraps(get_output)
    def get_output_with_counts(self: Any) -> Any:
        self.copy_event.synchronize()
        if self.num_nans is not None:
            self.num_nans = counts_of(self.num_nans)
        return get_output(self)

    setattr(module, "get_num_nans", get_num_nans)  # noqa: B010
    sampler.compute_nans = True
    sampler.sample = sample_from_vocabulary
    if not hasattr(get_output, _MARK):
        setattr(get_output_with_counts, _MARK, True)
        AsyncOutput.get_output = get_output_with_counts


def counts_of(bits: np.ndarray) -> np.ndarray | None:
    """Of each row 1 where it fails by the rule of `rows_not_finite`; None if none does, and vLLM then reports nothing.

    Args:
        bits: of each row's largest logit, a float32, read as int32.
    """
    failed = ~np.isfinite(bits.view(np.float32))
    return failed.astype(np.int32) if failed.any() else None


def _measure(runner: Any, measuring: Measuring) -> None:
    prompt_log_probs, sampler = runner.prompt_logprobs_worker, runner.sampler
    compute, sample = prompt_log_probs.compute_prompt_logprobs, sampler.sample

    def compute_prompt_logprobs(logits_fn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        measuring.score(hidden_states)
        return compute(logits_fn, hidden_states, *args, **kwargs)

    def sample_and_measure(
        logits: Tensor,
        expanded_idx_mapping: Any,
        idx_mapping: Any,
        idx_mapping_np: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        tokens, drawn_from = sample(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *args, **kwargs)
        if measuring.is_drawing:
            measuring.draw(idx_mapping_np, drawn_from, tokens)
        return tokens, drawn_from

    prompt_log_probs.compute_prompt_logprobs = compute_prompt_logprobs
    sampler.sample = sample_and_measure
