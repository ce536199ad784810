"""What must hold before a server that steers takes its first request."""

from collections.abc import Sequence
from typing import Any

from steerlab.core.errors import InputError
from steerlab.engines.vllm._client.isolation import idle_plan, isolation_prompt, require_isolated
from steerlab.engines.vllm._client.requests import ONE_TOKEN
from steerlab.engines.vllm._client.wiring_check import NOT_LOADED, check_workers
from steerlab.engines.vllm._server.gateway import Gateway
from steerlab.engines.vllm._server.plans import PlanMaker
from steerlab.engines.vllm._server.workers import AsyncEngine
from steerlab.engines.vllm._wire.config import KEY


async def check_server(gateway: Gateway, engine: AsyncEngine) -> list[dict[str, Any]]:
    """What every worker says of itself, if it is wired and the scheduler keeps steered cache blocks apart.

    Raises:
        InputError, HookPointError: otherwise.
    """
    maker = gateway.maker
    assert maker is not None
    if engine.vllm_config.kv_transfer_config is not None:
        raise InputError(
            "--kv-transfer-config hands cache blocks to stores that name them by their tokens alone, so steered blocks "
            "would reach others; leave it out."
        )
    try:
        workers = [header for header, _ in await gateway.workers.ask("describe")]
    except Exception as error:  # whatever crosses the process boundary
        raise InputError(NOT_LOADED) from error
    check_workers(workers, maker.config)
    await _check_isolation(gateway, maker, engine)
    return workers


async def _check_isolation(gateway: Gateway, maker: PlanMaker, engine: AsyncEngine) -> None:
    """See `_client.isolation`; here the steered run goes through the gateway, as clients' requests will."""
    tokens = isolation_prompt(engine.vllm_config.cache_config, maker.info)
    if tokens is None:
        return
    ticket = gateway.issue(maker.ready(idle_plan(maker.config, maker.info)))
    try:
        await _run(engine, tokens, "steerlab-start-steered", {KEY: ticket.id})
    finally:
        gateway.retire(ticket)
    n_cached = await _run(engine, tokens, "steerlab-start-plain", None)
    await engine.reset_prefix_cache()
    require_isolated(n_cached)


async def _run(engine: AsyncEngine, tokens: Sequence[int], name: str, arguments: dict[str, Any] | None) -> int:
    """Runs one token, and returns how many tokens of the prompt came from the cache."""
    from vllm import SamplingParams

    n_cached = 0
    prompt = {"prompt_token_ids": list(tokens)}
    async for output in engine.generate(prompt, SamplingParams(**ONE_TOKEN, extra_args=arguments), name):
        n_cached = output.num_cached_tokens or 0
    return n_cached
