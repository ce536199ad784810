"""A `vllm.LLM` of the user's own: what it is to be started with, and whether it was."""

from pathlib import Path
from typing import Any

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import resolve_layers
from steerlab.core._numbers import as_integer, as_list
from steerlab.core.errors import InputError
from steerlab.engines.vllm._client.info import read_config
from steerlab.engines.vllm._wire.config import KEY, SteeringConfig, is_ours, sites_in_order
from steerlab.models import resolve


@explains_arguments
def vllm_config(
    layers: "str | int | range | list[int] | tuple[int, ...]",
    *,
    model: "str | Path | None" = None,
    max_directions: int = 4,
    max_runs: int = 8,
    capture_tokens: int = 2048,
    score_bytes: int = 1 << 29,
    sites: "str | list[str] | tuple[str, ...]" = ("resid_post",),
    max_conditions: int = 2,
    max_token_rules: int = 2,
) -> dict[str, Any]:
    """What a `vllm.LLM` of your own takes as `additional_config`, for `sl.VLLMEngine.adopt` to steer and score it.

    Args:
        layers: as in `VLLMEngine`; `[]` wires none, for scoring and generation alone.
        model: needed for "all" and for layers that count from the end.
        max_directions: as in `VLLMEngine`.
        max_runs: as in `VLLMEngine`.
        capture_tokens: as in `VLLMEngine`.
        score_bytes: as in `VLLMEngine`.
        sites: as in `VLLMEngine`.
        max_conditions: as in `VLLMEngine`.
        max_token_rules: as in `VLLMEngine`.

    Returns:
        A dictionary that can be written as JSON; entries of yours may be added to it.

    Raises:
        HookPointError: for an unknown layer or site.
        InputError: for a layer that cannot be numbered without the model.

    Examples:
        >>> vllm_config(layers=[14])["steerlab"]["layers"]
        [14]
        >>> llm = vllm.LLM(name, additional_config=vllm_config(layers=[14]))  # doctest: +SKIP
        >>> engine = sl.VLLMEngine.adopt(llm)  # doctest: +SKIP
    """
    config = SteeringConfig(
        _numbered(layers, model),
        max_directions,
        max_runs,
        capture_tokens,
        score_bytes,
        sites_in_order(sites),
        max_conditions,
        max_token_rules,
    )
    return {KEY: config.to_json()}


def wired_layers(layers: Any, n_layers: int) -> tuple[int, ...]:
    """The layers to wire in a model with so many; none for an empty list.

    Raises:
        HookPointError: for an unknown layer.
    """
    return () if as_list(layers) == [] else tuple(resolve_layers(layers, n_layers))


def _numbered(layers: Any, model: "str | Path | None") -> tuple[int, ...]:
    if model is not None:
        return wired_layers(layers, int(read_config(resolve(model).path).get_text_config().num_hidden_layers))
    given = [layers] if as_integer(layers) is not None else as_list(layers)
    numbers = [None] if given is None else [as_integer(layer) for layer in given]
    known = [number for number in numbers if number is not None and number >= 0]
    if len(known) < len(numbers):
        raise InputError(
            f"layers={layers!r:.80} cannot be numbered without the model: pass model= too, or layers counted from 0."
        )
    return wired_layers(known, 1 + max(known, default=0))


def adopted_config(llm: Any) -> SteeringConfig:
    """What a `vllm.LLM` of the user's own was started with.

    Raises:
        InputError: if it was started without `vllm_config`, or with an argument that scores cannot be read under.
    """
    engine = getattr(llm, "llm_engine", None)
    if engine is None:
        raise InputError(f"adopt takes a vllm.LLM, got {type(llm).__name__}.")
    vllm_config = engine.vllm_config
    config = SteeringConfig.of(vllm_config) if is_ours(vllm_config) else None
    if config is None:
        raise InputError(
            "This vllm.LLM was started without steerlab's configuration, and what is wired cannot be changed once a "
            "model is compiled. Start it with additional_config=sl.vllm_config(layers=[…]), or layers=[] to score and "
            "generate only; or start the model with sl.VLLMEngine(name, layers=[…], **the same arguments), whose .llm "
            "is the LLM."
        )
    mode, kind = vllm_config.model_config.logprobs_mode, vllm_config.model_config.runner_type
    if mode != "raw_logprobs" or kind != "generate":
        raise InputError(
            f"This vllm.LLM was started with logprobs_mode={mode!r} and runner={kind!r}; it must be 'raw_logprobs' and "
            "'generate', vLLM's own defaults for a language model."
        )
    return config
