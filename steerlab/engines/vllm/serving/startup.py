"""What must hold before a server that steers takes its first request."""

from typing import Any

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError
from steerlab.engines.vllm.client import NOT_LOADED, check_workers
from steerlab.engines.vllm.config import KEY, SteeringConfig
from steerlab.engines.vllm.serving.gateway import Gateway
from steerlab.engines.vllm.serving.plans import PlanMaker
from steerlab.steering.operators import ablate
from steerlab.steering.plan import Plan
from steerlab.steering.positions import where
from steerlab.steering.vectors import SteeringVector


async def check_server(gateway: Gateway, engine: Any) -> None:
    """Nothing, if every worker is wired and the scheduler keeps steered cache blocks apart.

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


async def _check_isolation(gateway: Gateway, maker: PlanMaker, engine: Any) -> None:
    """Runs a prompt under an edit of scale 0, then without, and sees whether the second found the first's blocks."""
    cache = engine.vllm_config.cache_config
    length = 2 * int(cache.block_size) + 1
    if not cache.enable_prefix_caching or length + 1 > maker.info.context_length:
        return
    ticket = gateway.issue(maker.ready(_idle_plan(maker.config, maker.info)))
    tokens = [(7 * i + 1) % maker.info.d_vocab for i in range(length)]
    try:
        await _run(engine, tokens, "steerlab-start-steered", {KEY: ticket.id})
    finally:
        gateway.retire(ticket)
    cached = await _run(engine, tokens, "steerlab-start-plain", None)
    await engine.reset_prefix_cache()
    if cached:
        raise InputError(
            f"An unsteered request read {cached} tokens that a steered one had cached: the scheduler's process did not "
            "load steerlab's plugin. Check that VLLM_PLUGINS, if set, names `steerlab`."
        )


async def _run(engine: Any, tokens: list[int], name: str, arguments: dict[str, Any] | None) -> int:
    """Runs one token, and says how many tokens of the prompt came from the cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True, extra_args=arguments)
    cached = 0
    async for output in engine.generate({"prompt_token_ids": tokens}, params, name):
        cached = output.num_cached_tokens or 0
    return cached


def _idle_plan(config: SteeringConfig, info: ModelInfo) -> Plan:
    import torch

    direction = SteeringVector.from_tensor(torch.eye(1, info.d_model)[0], layer=config.layers[0])
    return Plan(ablate(direction, where=where.all())).scaled(0.0)
