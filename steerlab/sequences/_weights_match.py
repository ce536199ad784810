"""Whether an engine runs the same weights as the model that will score its samples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from steerlab._runtime.model_parts import ModelParts
from steerlab.core._text import encode_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.shipped import neutral_text
from steerlab.sequences.types import BatchedSequences

_PROMPT, _TARGET = 8, 32
_TOLERANCE, _NARROW_TOLERANCE, _NARROW_MEAN = 1e-3, 0.5, 0.2
"""Nats on one token; in half precision, in which two kernels differ that much, also in the mean."""

_USUAL_SURPRISAL = 8.0  # nats; rounding of a logit grows with its size, so more is allowed of less probable tokens


@torch.no_grad()
def parameters_fingerprint(root: nn.Module) -> tuple[Any, ...]:
    """Equal as long as no parameter was written to."""
    # sums too: version counters miss what is written through `.data`
    # written out, as NaN equals nothing
    return tuple((p._version, p.dtype, str(float(p.sum(dtype=torch.float32)))) for p in root.parameters())


def check_same_weights(
    parts: ModelParts, tokenizer: Any, engine: Engine, log_probs: Callable[[BatchedSequences], np.ndarray]
) -> None:
    """Nothing, if the engine's log-probs of a probe text equal the model's.

    Args:
        parts: the model's parts.
        tokenizer: its tokenizer.
        engine: the engine.
        log_probs: the model's own log-probs of one response.

    Raises:
        InputError: if they differ by more than rounding.
    """
    ids = encode_prompt(tokenizer, neutral_text(), d_vocab=parts.d_vocab).token_ids
    prompt, target = ids[:_PROMPT], ids[_PROMPT : _PROMPT + _TARGET]
    theirs = np.array(engine.score([list(prompt)], [[list(target)]])[0].token_log_probs)
    ours = log_probs(BatchedSequences.from_ids([prompt], [[target]]))
    dtypes = {str(parts.head.weight.dtype).removeprefix("torch."), engine.info.dtype}
    limit, mean = (_TOLERANCE, _TOLERANCE) if dtypes <= {"float32", "float64"} else (_NARROW_TOLERANCE, _NARROW_MEAN)
    size = np.maximum(1.0, -ours / _USUAL_SURPRISAL)
    allowed, difference = limit * size, np.abs(theirs - ours)
    excess = difference / allowed
    if not ((excess <= 1).all() and (difference / size).mean() <= mean):
        worst = int(np.nan_to_num(excess, nan=np.inf).argmax())
        raise InputError(
            f"The engine runs {engine.info.name}, whose log-probs of a probe text differ from the model's by "
            f"{difference[worst]:.3g} nats at a token and {difference.mean():.3g} in the mean, more than the "
            f"{allowed[worst]:.3g} and {mean:.3g} of rounding: its weights are not the model's. Load the engine from "
            "the weights that the model has now."
        )
