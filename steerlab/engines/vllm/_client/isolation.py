"""The check at start that the scheduler keeps steered cache blocks apart; it lives in a process of its own.

A prompt runs under edits that change nothing, then without any. The second run must not read blocks of the first.
"""

from typing import Any

import torch

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError
from steerlab.engines.vllm._client.compiled_plan import compile_plan
from steerlab.engines.vllm._client.connection import Connection
from steerlab.engines.vllm._client.ready_plans import ReadyPlan
from steerlab.engines.vllm._client.requests import ONE_TOKEN, Request
from steerlab.engines.vllm._client.run_requests import run_requests
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.steering._plan_assignment import AssignedPlan
from steerlab.steering.operators import ablate
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where
from steerlab.steering.vectors import SteeringVector


def check_isolation(connection: Connection, info: ModelInfo) -> None:
    """Runs the prompt steered and plain.

    Raises:
        InputError: if the plain run found blocks of the steered one: the patch of the cache's keys is not in place in
            the scheduler's process.
    """
    tokens = isolation_prompt(connection.vllm_config.cache_config, info)
    if tokens is None or not connection.config.points:
        return
    plan = idle_plan(connection.config, info)
    steered = ReadyPlan(AssignedPlan(plan, None), compile_plan(plan, connection.config))
    run_requests(connection, [_request(tokens, steered)], "start")
    (plain,) = run_requests(connection, [_request(tokens, ReadyPlan(AssignedPlan(Plan(), None), None))], "start")
    connection.llm.reset_prefix_cache()
    require_isolated(plain.output.num_cached_tokens)


def isolation_prompt(cache_config: Any, info: ModelInfo) -> tuple[int, ...] | None:
    """A prompt of two whole cache blocks and a token; None where no block can be shared."""
    length = 2 * int(cache_config.block_size) + 1
    if not cache_config.enable_prefix_caching or length + 1 > info.context_length:
        return None
    return tuple((7 * i + 1) % info.d_vocab for i in range(length))


def idle_plan(config: SteeringConfig, info: ModelInfo) -> Plan:
    """A plan whose edits, at all positions, change nothing."""
    point = config.points[0]
    direction = SteeringVector.from_tensor(torch.eye(1, info.d_model)[0], layer=point.layer, site=point.site)
    return Plan(ablate(direction, where=where.all())).scaled(0.0)


def require_isolated(n_cached: int | None) -> None:
    """Checks that the plain run read nothing from the cache.

    Raises:
        InputError: otherwise.
    """
    if n_cached:
        raise InputError(
            f"An unsteered request read {n_cached} tokens that a steered one had cached: the scheduler's process did "
            "not load steerlab's plugin. Check that VLLM_PLUGINS, if set, names `steerlab`."
        )


def _request(tokens: tuple[int, ...], ready: ReadyPlan) -> Request:
    groups = () if ready.compiled is None else (((0, len(tokens)),),)
    return Request(0, 0, tokens, ONE_TOKEN, ready.assigned, ready.compiled, groups)
