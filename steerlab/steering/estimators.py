"""Estimators: from activations of positive and negative prompts to a direction."""

from collections.abc import Callable
from typing import Final

from jaxtyping import Float
from torch import Tensor

from steerlab.core.errors import InputError

Estimator = Callable[[Float[Tensor, "pairs d_model"], Float[Tensor, "pairs d_model"]], Float[Tensor, " d_model"]]


def mean_diff(
    positive: Float[Tensor, "pairs d_model"], negative: Float[Tensor, "pairs d_model"]
) -> Float[Tensor, " d_model"]:
    """Mean of the differences h⁺ − h⁻, summed in float64.

    Source:
        Rimsky et al. 2023, Steering Llama 2 via Contrastive Activation Addition (arXiv:2312.06681), equation 1.
    """
    return (positive.double() - negative.double()).mean(dim=0).float()


ESTIMATORS: Final[dict[str, Estimator]] = {"mean_diff": mean_diff}


def estimator(method: str) -> Estimator:
    """The estimator of this name.

    Raises:
        InputError: for an unknown name; lists the known ones.
    """
    if method not in ESTIMATORS:
        raise InputError(f"Unknown extraction method {method!r}; known: {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[method]
