"""Model Runner V2 (GPU): tells the steering state, before each pass, which requests it holds and where they are.

Wraps three methods of the runner's model state, on the instance: `add_request` and `remove_request`, which name the
slot a request has for as long as it runs, and `prepare_inputs`, called before every pass that is not a graph capture.
Everything it needs is on the host already, also with async scheduling: without speculative decoding the host's count
of computed tokens is exact.
"""

from typing import Any

import numpy as np

from steerlab.engines.vllm.specs import RequestSpec
from steerlab.engines.vllm.steering_state import SteeringState


def connect(runner: Any, state: SteeringState) -> None:
    """Wraps the runner's model state."""
    model_state, req_states = runner.model_state, runner.req_states
    add, remove, prepare = model_state.add_request, model_state.remove_request, model_state.prepare_inputs

    def add_request(req_index: int, new_req_data: Any) -> None:
        add(req_index, new_req_data)
        state.enter(req_index, RequestSpec.of(new_req_data.sampling_params))

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
            )
        else:  # a dummy pass, for profiling or to keep ranks in step
            state.begin_empty()
        return prepare(input_batch, states)

    model_state.add_request = add_request
    model_state.remove_request = remove_request
    model_state.prepare_inputs = prepare_inputs
