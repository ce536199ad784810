"""What is said when a model's numbers are no longer finite: one sentence on every engine and for every measure."""

from steerlab.core.errors import NonFiniteError


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
