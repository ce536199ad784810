"""Values of a call that are not finite, and are not handed to anybody."""

from collections.abc import Sequence

import numpy as np

from steerlab.core.not_finite import listed, not_finite
from steerlab.engines.vllm.client.requests import Outcome, Request


def require_finite(requests: Sequence[Request], outcomes: Sequence[Outcome], dtype: str) -> None:
    """Checks that everything that was measured and read is a number; −inf is a log-probability of 0.

    Raises:
        NonFiniteError: otherwise; names the prompts.
    """
    failed = [r for r, o in zip(requests, outcomes, strict=True) if o.has_failed or _has_nan(o)]
    if failed:
        indices = sorted({request.prompt_index for request in failed})
        what = f"The activations or logits of prompt{'s' if len(indices) > 1 else ''} {listed(indices)}"
        raise not_finite(what, dtype, steered=any(request.compiled is not None for request in failed))


def _has_nan(outcome: Outcome) -> bool:
    distributions = () if outcome.distribution is None else (outcome.distribution,)
    return any(bool(np.isnan(values).any()) for values in (outcome.measured, *distributions)) or any(
        not bool(np.isfinite(stream).all()) for stream in outcome.streams.values()
    )
