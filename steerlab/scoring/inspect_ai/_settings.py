"""From inspect's settings of generation to an engine's; what an engine does not have is refused."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steerlab.core._numbers import check_integer
from steerlab.core._seeds import check_single_seed
from steerlab.core._stopping import stop_strings
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy

MAX_TOKENS = 2048
"""Tokens at most where a task does not say; as in inspect's own models that run locally."""

_POLICY = ("temperature", "top_p", "top_k")
_BODY = ("min_p", "repetition_penalty")
_TAKEN = (*_POLICY, "max_tokens", "stop_seqs", "seed", "num_choices", "logprobs", "extra_body")
_INSPECTS_OWN = (
    "max_retries",
    "timeout",
    "attempt_timeout",
    "stream_idle_timeout",
    "max_connections",
    "adaptive_connections",
    "system_message",
    "max_tool_output",
    "fail_on_refusal",
    "reasoning_history",
    "cache",
)
"""What inspect itself sees to."""

_SEEDS = 1 << 31


@dataclass(frozen=True)
class Settings:
    """What requests of one batch have in common.

    Attributes:
        policy: the sampling policy; what a request does not state is off.
        max_new_tokens: tokens at most.
        n: completions of each prompt.
        stop: strings that end a completion.
    """

    policy: SamplingPolicy
    max_new_tokens: int
    n: int
    stop: tuple[str, ...]


def settings_of(config: Any, room: int) -> Settings:
    """The settings that a `GenerateConfig` states.

    Args:
        config: the `GenerateConfig`.
        room: tokens that fit after the prompt.

    Raises:
        InputError: for a setting without counterpart.
        PolicyError: for a value outside its range.
    """
    stated = config.model_dump(exclude_none=True)
    unknown = sorted(name for name, value in stated.items() if value and name not in (*_TAKEN, *_INSPECTS_OWN))
    if unknown:
        raise InputError(
            f"{', '.join(unknown)}: an engine has no such setting. It takes {', '.join(_TAKEN)}, the last one with "
            f"{' and '.join(_BODY)}."
        )
    policy = {name: stated[name] for name in _POLICY if name in stated}
    wanted = check_integer(stated.get("max_tokens", MAX_TOKENS), "max_tokens", least=1)
    return Settings(
        SamplingPolicy(**policy, **_further(stated.get("extra_body", {}))),
        min(wanted, room),
        check_integer(stated.get("num_choices", 1), "num_choices", least=1),
        tuple(stop_strings(stated.get("stop_seqs", ()))),
    )


def _further(body: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(body) - set(_BODY))
    if unknown:
        raise InputError(f"extra_body takes {' and '.join(_BODY)}, got {', '.join(map(str, unknown))}.")
    return dict(body)


def seed_of(config: Any) -> int:
    """The seed of a request; a new one where none is stated."""
    return secrets.randbelow(_SEEDS) if config.seed is None else check_single_seed(config.seed)
