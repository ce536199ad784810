"""Importance weights: samples of one policy speaking for another."""

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np

from steerlab.core.errors import InputError
from steerlab.measures.nucleus import truncates
from steerlab.sequences.types import LogprobResults

_UNMOVED = 1e-3  # nats a sequence; less is rounding


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of sequences drawn under one policy, for expectations under another.

    Attributes:
        log_weights: log of the target's probability over the sampler's, per sequence, nats, [B, G]; −inf where the
            target could not have drawn the sequence.
        outside_share: share of tokens outside the target's nucleus.
        biased: whether truncation makes them biased, because the target may reach sequences that were never drawn.
    """

    log_weights: np.ndarray
    outside_share: float
    biased: bool

    @property
    def weights(self) -> np.ndarray:
        """The weights, [B, G]; their mean over samples estimates 1."""
        return np.exp(self.log_weights)

    @property
    def normalised(self) -> np.ndarray:
        """Weights that sum to 1 over all sequences, [B, G]; NaN if all are 0."""
        highest = self.log_weights.max()
        if highest == -math.inf:
            return np.full_like(self.log_weights, math.nan)
        shifted = np.exp(self.log_weights - highest)
        return shifted / shifted.sum()

    @property
    def effective_sample_size(self) -> float:
        """(Σw)² / Σw²: how many unweighted samples they are worth; 0 if all weights are 0.

        Source:
            Kong 1992; Owen 2013, "Monte Carlo theory, methods and examples", chapter 9.3.
        """
        if self.log_weights.max() == -math.inf:
            return 0.0
        return float(1 / np.sum(self.normalised**2))


def importance_weights(
    new: LogprobResults, old: LogprobResults, *, target: Literal["policy", "model"] = "policy"
) -> ImportanceWeights:
    """Weights of the same sequences scored under other parameters, log π′ − log q.

    Both sides are teacher-forced scores, so that unchanged parameters give weights of exactly 1.

    Args:
        new: scores under the target's parameters.
        old: scores under the parameters that drew the sequences.
        target: `policy` weighs for the new parameters under the same sampling policy (log q′ − log q); `model` for the
            new model's own softmax (log p′ − log q).

    Returns:
        The weights.

    Warns:
        UserWarning: if the policy truncates (top_p < 1) and weights differ from 1 by more than rounding: sequences that
            the target could reach and the sampler could not are missing, so that estimates are biased.

    Raises:
        InputError: if the two are not scores of the same sequences, or a sequence cannot have been drawn.
    """
    if target not in ("policy", "model"):
        raise InputError(f"target is 'policy' or 'model', got {target!r}.")
    if [[len(v) for v in row] for row in new.logprobs] != [[len(v) for v in row] for row in old.logprobs]:
        raise InputError("new and old are scores of different sequences: their lengths differ.")
    if new.policy != old.policy:
        raise InputError(f"new was scored under {new.policy}, old under {old.policy}; use one policy on both sides.")
    drawn = np.array(old.sequence_logqs)
    if np.isneginf(drawn).any():
        b, g = np.argwhere(np.isneginf(drawn))[0]
        raise InputError(
            f"Sequence ({b}, {g}) has a token outside the nucleus of {old.policy}: it was not drawn under that policy, "
            "so it has no importance weight."
        )
    aimed = np.array(new.sequence_logqs if target == "policy" else new.sequence_logprobs)
    log_weights = aimed - drawn
    tokens = sum(values.size for row in new.outside_nucleus for values in row)
    outside = sum(int(values.sum()) for row in new.outside_nucleus for values in row)
    biased = truncates(old.policy) and bool((np.abs(log_weights) > _UNMOVED).any())
    if biased:
        warnings.warn(
            f"{old.policy} truncates, so sequences outside its nucleus were never drawn: importance weights are biased "
            f"({outside} of {tokens} tokens lie outside the target's nucleus). Sample with top_p=1 for unbiased ones.",
            UserWarning,
            stacklevel=2,
        )
    return ImportanceWeights(log_weights, outside / tokens if tokens else math.nan, biased)
