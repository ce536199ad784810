"""Wires a model that a worker has just loaded: probes its stream, makes the buffers, puts the operator in place."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steerlab.core.errors import InputError, SteerlabError
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._worker import cpu_generators, runner_v1, runner_v2
from steerlab.engines.vllm._worker.head import find_head
from steerlab.engines.vllm._worker.layers import attach, find_layers
from steerlab.engines.vllm._worker.measuring import Buffers, Measuring
from steerlab.engines.vllm._worker.probe import Probed, probe
from steerlab.engines.vllm._worker.row_sums import row_sums
from steerlab.engines.vllm._worker.steering_state import SteeringState
from steerlab.engines.vllm._worker.tables import Tables

ATTRIBUTE = "steerlab_wired"
"""Of a worker: a `Wired`, or the reason why it is not wired."""


@dataclass(frozen=True)
class Wired:
    """What a wired worker keeps.

    Attributes:
        state: its steering state.
        probed: what the load-time probe found.
        runner: `v1` or `v2`.
    """

    state: SteeringState
    probed: Probed
    runner: str


def wire(worker: Any, config: SteeringConfig) -> None:
    """Wires a worker, or notes why it cannot be; called by the patched `load_model`.

    A worker that raises here would end the engine with a message that hides the reason, so the engine asks for it.
    """
    try:
        wired: Wired | str = _wire(worker, config)
    except SteerlabError as error:
        wired = str(error)
    setattr(worker, ATTRIBUTE, wired)


def _wire(worker: Any, config: SteeringConfig) -> Wired:
    check_features(worker.vllm_config)
    runner = worker.model_runner
    found, probed = _identified(worker, config)
    here = [index for index, point in enumerate(config.points) if found[point.layer] is not None]
    tables = _tables(worker, config, len(here))
    measuring = _measuring(worker, config)
    state = SteeringState(config, tables, here, measuring)
    if hasattr(runner, "model_memory_usage"):  # what vLLM leaves free when it sizes the cache
        ours = tables.n_bytes + state.following.n_bytes
        runner.model_memory_usage += ours + (0 if measuring is None else measuring.buffers.n_bytes)
    for index, which in enumerate(here):
        point = config.points[which]
        layer = found[point.layer]
        assert layer is not None
        inside = probed.inside.get(point.layer, {})
        attach(layer, point.site, tables.of_point(index), inside.get(point.site, probed.rule))
    is_v2 = hasattr(runner, "model_state")
    (runner_v2 if is_v2 else runner_v1).connect(runner, state)
    if not is_v2 and worker.device.type == "cpu":
        cpu_generators.install(runner)
    return Wired(state, probed, "v2" if is_v2 else "v1")


def _identified(worker: Any, config: SteeringConfig) -> tuple[list[nn.Module | None], Probed]:
    """The decoder layers and their stream; without layers to wire, none are looked for.

    Raises:
        HookPointError: for a layer that the model does not have, or a stream that cannot be identified.
    """
    if not config.layers:
        return [], Probed("single", ())
    n_layers = int(worker.vllm_config.model_config.hf_text_config.num_hidden_layers)
    for point in config.points:
        point.check(n_layers)
    found = find_layers(worker.model_runner.get_model(), n_layers)
    return found, probe(worker, found, config.points)


def _tables(worker: Any, config: SteeringConfig, n_points: int) -> Tables:
    vllm_config = worker.vllm_config
    text = vllm_config.model_config.hf_text_config
    return Tables.make(
        config,
        n_points=n_points,
        n_slots=vllm_config.scheduler_config.max_num_seqs,
        n_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        d_model=int(text.hidden_size),
        dtype=vllm_config.model_config.dtype,
        device=worker.device,
    )


def _measuring(worker: Any, config: SteeringConfig) -> Measuring | None:
    """What scores; only the last pipeline stage has the LM head."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    if not config.score_bytes or not get_pp_group().is_last_rank:
        return None
    model_config, scheduler = worker.vllm_config.model_config, worker.vllm_config.scheduler_config
    d_model = int(model_config.hf_text_config.hidden_size)
    head = find_head(worker.model_runner.get_model(), d_model, model_config.dtype, worker.device)
    buffers = Buffers.make(head, config.score_bytes, scheduler.max_num_batched_tokens, worker.device)
    no_token = torch.zeros(1, dtype=torch.int64, device=worker.device)
    row_sums(buffers.logits[:1].zero_(), no_token, head.n_valid, head.offset)  # builds the kernel before any request
    is_first = get_tp_group().rank_in_group == 0
    return Measuring(head, buffers, scheduler.max_num_seqs, keeps_distributions=is_first)


def check_features(vllm_config: Any) -> None:
    """Checks that steering works with everything that is switched on.

    Raises:
        InputError: otherwise, naming the feature.
    """
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    refused = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "dual batch overlap (enable_dbo)": bool(getattr(parallel, "enable_dbo", False)),
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "sequence parallelism (pass_config.enable_sp)": bool(
            getattr(getattr(compilation, "pass_config", None), "enable_sp", False)
        ),
        "kv_sharing_fast_prefill": bool(getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False)),
        "kv_transfer_config, whose stores name cache blocks by their tokens alone,": (
            getattr(vllm_config, "kv_transfer_config", None) is not None
        ),
        "data parallelism": parallel.data_parallel_size > 1,
        "enforce_eager on pipeline stages on a CPU, where vLLM itself then fails at the first request,": (
            parallel.pipeline_parallel_size > 1
            and vllm_config.model_config.enforce_eager
            and vllm_config.device_config.device_type == "cpu"
        ),
    }
    on = [name for name, is_on in refused.items() if is_on]
    if on:
        raise InputError(f"Steering inside vLLM does not work together with {', '.join(on)}; switch it off.")
