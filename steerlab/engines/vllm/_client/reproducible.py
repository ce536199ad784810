"""The check at start that vLLM gives the same text the same log-probabilities twice.

On some shapes of some families stock vLLM does not: what a kernel leaves in memory decides. No score of such an engine
means anything, and nothing else would show it.
"""

import numpy as np

from steerlab.core._warning import warn
from steerlab.core.engine import ModelInfo
from steerlab.engines.vllm._client.connection import Connection
from steerlab.engines.vllm._client.requests import ONE_TOKEN, Request
from steerlab.engines.vllm._client.run_requests import run_requests
from steerlab.engines.vllm._wire.request_spec import ScoreSpec
from steerlab.measures.quantities import TokenLogProb
from steerlab.steering._plan_assignment import AssignedPlan
from steerlab.steering.plan import Plan

LENGTH = 24
"""Tokens of the text; fewer than a cache block, so that the second run reads nothing from the cache."""

ALLOWED = {"float32": 1e-3, "float64": 1e-3}
COARSE = 0.1
"""Nats that a token may differ by, in half precision, where kernels may sum in another order each time."""


def check_reproducible(connection: Connection, info: ModelInfo) -> None:
    """Scores a short text twice, and warns if the two differ."""
    length = min(LENGTH, info.context_length - 1, int(connection.vllm_config.cache_config.block_size) - 1)
    if not connection.config.score_bytes or length < 3:
        return
    first, second = (_scores(connection, length, info.d_vocab) for _ in range(2))
    difference = irreproducible(first, second, info.dtype)
    if difference is not None:
        kind = connection.vllm_config.model_config.architectures
        warn(
            f"vLLM scored the same text of {length} tokens twice and found {difference}. This is vLLM's own doing on "
            f"{', '.join(kind or ['this model'])} as it is set up here: do not rely on numbers from this engine. "
            "Compare with sl.load, or try another dtype or attention backend."
        )


def irreproducible(first: np.ndarray, second: np.ndarray, dtype: str) -> str | None:
    """How two scores of the same tokens differ, in words; None if rounding explains it. NaN counts as different.

    Args:
        first: log-probabilities, in nats.
        second: those of another run.
        dtype: of the activations.
    """
    bound = ALLOWED.get(dtype, COARSE)
    if first.shape == second.shape and bool((np.abs(first - second) <= bound).all()):
        return None
    return f"{first.sum():.2f} and {second.sum():.2f} nats in all"


def _scores(connection: Connection, length: int, d_vocab: int) -> np.ndarray:
    tokens = tuple((11 * i + 3) % d_vocab for i in range(length))
    request = Request(
        0, 0, tokens[:1], ONE_TOKEN, AssignedPlan(Plan(), None), further_ids=tokens[1:-1],
        score=ScoreSpec(0, tokens[1:], (TokenLogProb(),)),
    )  # fmt: skip
    (outcome,) = run_requests(connection, [request], "")
    return outcome.measured[0]
