"""The check at start that the scheduler keeps steered cache blocks apart; it lives in a process of its own."""

from typing import Any

import numpy as np

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError
from steerlab.engines.vllm.call import carry_out
from steerlab.engines.vllm.client import Client
from steerlab.engines.vllm.compiled_plan import CompiledPlan
from steerlab.engines.vllm.requests import Request
from steerlab.steering.plan import Plan
from steerlab.steering.plan_assignment import AssignedPlan

_ARGUMENTS = {"temperature": 0.0, "max_tokens": 1, "detokenize": False, "ignore_eos": True}


def check_isolation(client: Client, info: ModelInfo) -> None:
    """Runs a prompt under an edit of strength 0, then without, and sees whether the second found the first's blocks.

    Raises:
        InputError: if it did: the patch of the cache's keys is not in place in the scheduler's process.
    """
    cache = client.vllm_config.cache_config
    length = 2 * int(cache.block_size) + 1
    if not cache.enable_prefix_caching or length + 1 > info.context_length:
        return
    tokens = tuple((7 * i + 1) % info.d_vocab for i in range(length))
    carry_out(client, [_request(tokens, _idle_plan(client, info), length)], "start")
    (plain,) = carry_out(client, [_request(tokens, None, length)], "start")
    client.llm.reset_prefix_cache()
    if plain.output.num_cached_tokens:
        raise InputError(
            f"An unsteered request read {plain.output.num_cached_tokens} tokens that a steered one had cached: the "
            "scheduler's process did not load steerlab's plugin. Check that VLLM_PLUGINS, if set, names `steerlab`."
        )


def _request(tokens: tuple[int, ...], plan: CompiledPlan | None, length: int) -> Request:
    groups: Any = () if plan is None else (((0, length),),)
    return Request(0, 0, tokens, _ARGUMENTS, AssignedPlan(Plan(), None), plan, groups)


def _idle_plan(client: Client, info: ModelInfo) -> CompiledPlan:
    unit = np.zeros((1, info.d_model), dtype=np.float32)
    unit[0, 0] = 1.0
    params = np.array([[0.0, 0.0, -np.inf, np.inf, 0.0]], dtype=np.float32)
    return CompiledPlan("start", (client.config.layers[0],), (0,), (0,), unit, params, ())
