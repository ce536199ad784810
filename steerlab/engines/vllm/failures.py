"""Rows whose activations or logits are not finite: what a call says of them."""

import warnings
from collections.abc import Sequence

import numpy as np

from steerlab.core.errors import NonFiniteError
from steerlab.core.results import Completion
from steerlab.engines.vllm.requests import Outcome, Request


def not_finite(what: str, dtype: str) -> NonFiniteError:
    """The error of one row.

    Args:
        what: names the row, as the beginning of a sentence.
        dtype: the model's.
    """
    hint = "bfloat16 or float32, which reach further than float16" if dtype == "float16" else "a smaller strength"
    return NonFiniteError(
        f"{what} has activations or logits that are NaN or infinite: they left the range of {dtype}. Try {hint}."
    )


def failed_rows(completions: Sequence[Completion], dtype: str) -> dict[int, NonFiniteError]:
    """The error of every prompt with a completion that ended so; warns that there are some."""
    failed = [row for row in completions if row.finish_reason == "error"]
    errors = {row.prompt_index: not_finite(f"Prompt {row.prompt_index}", dtype) for row in failed}
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
    failed = sorted({r.prompt_index for r, o in zip(requests, outcomes, strict=True) if o.has_failed or _has_nan(o)})
    if failed:
        shown = ", ".join(map(str, failed[:8])) + (f" and {len(failed) - 8} more" if len(failed) > 8 else "")
        raise not_finite(f"{'Prompt' if len(failed) == 1 else 'Each of the prompts'} {shown}", dtype)


def _has_nan(outcome: Outcome) -> bool:
    distributions = () if outcome.distribution is None else (outcome.distribution,)
    return any(bool(np.isnan(values).any()) for values in (outcome.measured, *distributions)) or any(
        not bool(np.isfinite(stream).all()) for stream in outcome.streams.values()
    )
