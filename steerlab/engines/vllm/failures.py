"""Rows whose activations or logits are not finite: what a call says of them."""

import warnings
from collections.abc import Sequence

import numpy as np

from steerlab.core.errors import NonFiniteError
from steerlab.core.not_finite import not_finite
from steerlab.core.results import Completion
from steerlab.engines.vllm.requests import Outcome, Request


def failed_rows(
    requests: Sequence[Request], completions: Sequence[Completion], dtype: str
) -> dict[int, NonFiniteError]:
    """The error of every prompt with a completion that ended so; warns that there are some."""
    failed = [request for request, row in zip(requests, completions, strict=True) if row.finish_reason == "error"]
    errors = {request.prompt_index: _error([request], dtype) for request in failed}
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(completions)} completions ended with finish_reason 'error', the first with: "
            f"{next(iter(errors.values()))} `errors` has each.",
            UserWarning,
            stacklevel=3,
        )
    return errors


def require_finite(requests: Sequence[Request], outcomes: Sequence[Outcome], dtype: str) -> None:
    """Checks that everything that was measured and read is a number; −inf is a log-probability of 0.

    Raises:
        NonFiniteError: otherwise; names the prompts.
    """
    failed = [r for r, o in zip(requests, outcomes, strict=True) if o.has_failed or _has_nan(o)]
    if failed:
        raise _error(failed, dtype)


def _error(failed: Sequence[Request], dtype: str) -> NonFiniteError:
    indices = sorted({request.prompt_index for request in failed})
    shown = ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
    what = f"The activations or logits of prompt{'s' * (len(indices) > 1)} {shown}"
    return not_finite(what, dtype, steered=any(request.compiled is not None for request in failed))


def _has_nan(outcome: Outcome) -> bool:
    distributions = () if outcome.distribution is None else (outcome.distribution,)
    return any(bool(np.isnan(values).any()) for values in (outcome.measured, *distributions)) or any(
        not bool(np.isfinite(stream).all()) for stream in outcome.streams.values()
    )
