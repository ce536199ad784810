"""A sampling policy in vLLM's terms."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from steerlab.core.errors import PolicyError
from steerlab.core.policy import SamplingPolicy

LOWEST_TEMPERATURE = 0.01


def check_policy(policy: SamplingPolicy) -> SamplingPolicy:
    """The policy itself, if it is one and vLLM samples from exactly it.

    Raises:
        PolicyError: otherwise; vLLM would sample from something else without saying so.
    """
    SamplingPolicy.check(policy)
    if policy.min_p > 0 and (policy.top_k > 0 or policy.top_p < 1) and not policy.is_greedy:
        raise PolicyError(
            f"vLLM applies min_p before top_k and top_p, this policy states the reverse order: min_p={policy.min_p}, "
            f"top_k={policy.top_k}, top_p={policy.top_p}. Leave one side out, or use the TransformerLens engine."
        )
    if 0 < policy.temperature < LOWEST_TEMPERATURE:
        raise PolicyError(
            f"vLLM raises a temperature below {LOWEST_TEMPERATURE} to that value, got {policy.temperature}; use 0 for "
            "greedy."
        )
    return policy


def policy_arguments(policy: SamplingPolicy) -> dict[str, Any]:
    """A policy as arguments of vLLM's SamplingParams; every value explicit."""
    return {
        "temperature": policy.temperature,
        "top_p": policy.top_p,
        "top_k": policy.top_k,
        "min_p": policy.min_p,
        "repetition_penalty": policy.repetition_penalty,
    }


def request_seed(key: tuple[int, ...]) -> int:
    """One completion's seed, a function of its key alone; see `steerlab.core._seeds.row_key`."""
    state = np.random.SeedSequence(key[0], spawn_key=key[1:]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def must_measure_q(policy: SamplingPolicy) -> bool:
    """Whether log q of a sampled token needs the whole distribution at its step."""
    return not policy.is_greedy and policy != SamplingPolicy()


def token_log_qs(
    policy: SamplingPolicy, token_log_probs: Sequence[float], measured: Sequence[float] | None = None
) -> list[float]:
    """Log q of sampled tokens: by the policy's nature, or as the workers measured it, else NaN.

    A greedy draw has log q 0; without temperature, filters and penalty q is the model's p.

    Args:
        policy: the sampling policy.
        token_log_probs: the model's log p of each token.
        measured: log q of each token where the policy needs it; None if it was not measured.
    """
    if policy.is_greedy:
        return [0.0] * len(token_log_probs)
    if not must_measure_q(policy):
        return list(token_log_probs)
    return [float("nan")] * len(token_log_probs) if measured is None else list(measured)
