"""Vectors as text inside JSON: base64 of little-endian float32."""

import base64
import binascii

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core.errors import PlanError


def pack(values: Float[Tensor, " d_model"]) -> str:
    """The values as base64 text."""
    return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()


def unpack(text: str) -> Float[Tensor, " d_model"]:
    """The values that `pack` wrote.

    Raises:
        PlanError: if the text is something else.
    """
    try:
        return torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").copy())
    except (binascii.Error, ValueError, TypeError) as error:
        raise PlanError(f"Not the values of a vector: {text!r:.60}.") from error
