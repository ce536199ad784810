"""The error for activations or logits that are not finite, the same on every engine and for every measure."""

import logging
from collections.abc import Collection, Sequence

from steerlab.core.errors import NonFiniteError
from steerlab.core.results import Completion

_LOG = logging.getLogger(__name__)


def not_finite(what: str, dtype: object, *, steered: bool = False) -> NonFiniteError:
    """The error for numbers that are NaN or infinite.

    Args:
        what: whose numbers, as the beginning of a sentence, e.g. "The logits of prompt 3".
        dtype: the one that the model runs in, of torch or by name.
        steered: whether a plan or a hook was at work.
    """
    narrow = str(dtype).removeprefix("torch.") == "float16"
    overflow = (
        "float16 overflows: its largest number is 65504, and this model's stream goes beyond it. Load the model with "
        "dtype='bfloat16' or dtype='float32'."
    )
    if steered:
        cause = "The plan or a hook drives the stream out of range; give a smaller strength." + (
            f" If it is so without a plan too, {overflow}" if narrow else ""
        )
    else:
        cause = overflow if narrow else "The model's own weights, or a hook of yours, drive its stream out of range."
    return NonFiniteError(f"{what} are not finite (NaN or infinite). {cause}")


def failed_prompts(
    completions: Sequence[Completion], steered: Collection[int], dtype: object, *, must_run: bool = True
) -> dict[int, NonFiniteError]:
    """The errors of prompts with a completion that ended because its logits were not finite; logs that there are some.

    Args:
        completions: all that ran in a call.
        steered: indices of the prompts that ran under a plan.
        dtype: the model's.
        must_run: whether it is an error of the call if no unsteered row has finite logits.

    Returns:
        Per index of a prompt its error.

    Raises:
        NonFiniteError: if every row failed and none was steered: then the model cannot run as it is.
    """
    failed = [row for row in completions if row.finish_reason == "error"]
    errors = {
        row.prompt_index: not_finite(
            f"The logits of prompt {row.prompt_index}", dtype, steered=row.prompt_index in steered
        )
        for row in failed
    }
    if not failed:
        return errors
    first = next(iter(errors.values()))
    if must_run and len(failed) == len(completions) and not any(index in steered for index in errors):
        raise first
    _LOG.warning(
        "%d of %d completions ended with finish_reason 'error', of prompts %s. The first: %s",
        len(failed),
        len(completions),
        listed(list(errors)),
        first,
    )
    return errors


def listed(indices: Sequence[int]) -> str:
    """Some indices for a message, not more than eight of them."""
    return ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
