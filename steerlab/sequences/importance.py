"""Importance weights: samples of one policy speaking for another, and how healthy their ratios are."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from steerlab.core._warning import warn
from steerlab.core.errors import InputError
from steerlab.measures.nucleus import truncates
from steerlab.sequences.types import BatchedSequences, LogprobResults, Support, as_array

if TYPE_CHECKING:
    import pandas as pd

_UNMOVED = 1e-3  # nats a sequence; less is rounding
HEALTHY = (0.9, 1.1)
"""Where a token's ratio counts as near 1."""


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

    Both sides are teacher-forced scores, so that unchanged parameters give weights of exactly 1. Scores on replayed
    supports weigh for the policy that keeps, after each prefix, the set that the sampler drew from: nothing that it can
    reach is missing, so these weights are unbiased for it whatever the parameters.

    Args:
        new: scores under the target's parameters.
        old: scores under the parameters that drew the sequences.
        target: `policy` weighs for the new parameters under the same sampling policy (log q′ − log q); `model` for the
            new model's own softmax (log p′ − log q).

    Returns:
        The weights.

    Warns:
        UserWarning: if the policy truncates (top_p < 1), supports are not replayed, and weights differ from 1 by more
            than rounding: sequences that the target could reach and the sampler could not are missing, so that
            estimates are biased.

    Raises:
        InputError: if the two are not scores of the same sequences, or a sequence cannot have been drawn.
    """
    if target not in ("policy", "model"):
        raise InputError(f"target is 'policy' or 'model', got {target!r}.")
    _check_comparable(new, old)
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
    covered = old.support == "replayed" and target == "policy"
    biased = truncates(old.policy) and not covered and bool((np.abs(log_weights) > _UNMOVED).any())
    if biased:
        warn(
            f"{old.policy} truncates, so sequences outside its nucleus were never drawn: importance weights are biased "
            f"({outside} of {tokens} tokens lie outside the target's nucleus). Sample with top_p=1 for unbiased ones."
        )
    return ImportanceWeights(log_weights, outside / tokens if tokens else math.nan, biased)


def _check_comparable(new: LogprobResults, old: LogprobResults) -> None:
    for name, given in (("new", new), ("old", old)):
        if not isinstance(given, LogprobResults):
            raise InputError(
                f"{name} is what processor.teacher_force_logprobs(sequences) gave, got {type(given).__name__}."
            )
    if [[len(v) for v in row] for row in new.logprobs] != [[len(v) for v in row] for row in old.logprobs]:
        raise InputError("new and old are scores of different sequences: their lengths differ.")
    if new.policy != old.policy:
        raise InputError(f"new was scored under {new.policy}, old under {old.policy}; use one policy on both sides.")
    if new.support != old.support:
        raise InputError(f"new was scored on {new.support} supports, old on {old.support} ones; use one on both sides.")


def token_ratios(new: LogprobResults, old: LogprobResults | BatchedSequences) -> list[list[np.ndarray]]:
    """Ratios q′(y) / q(y) of every token, `[B][G]` arrays [T], float64.

    Args:
        new: scores under the target's parameters.
        old: scores of the same sequences under the parameters that drew them; or the sequences themselves, for the
            sampler's own log q.

    Returns:
        The ratios; 0 where the target could not have drawn the token. Between two passes with the same parameters and
        precision, on replayed supports, every one is exactly 1.

    Raises:
        InputError: if the two do not belong together, or a token cannot have been drawn.
    """
    if isinstance(old, BatchedSequences):
        if old.sampler_logqs is None:
            raise InputError("These sequences carry no log q of their sampler; score them and pass the results as old.")
        if old.policy not in (None, new.policy):
            raise InputError(f"new was scored under {new.policy}, the sequences were drawn under {old.policy}.")
        drawn = old.sampler_logqs
    else:
        _check_comparable(new, old)
        drawn = [[as_array(values) for values in row] for row in old.token_logqs]
    if [[len(v) for v in row] for row in new.logprobs] != [[len(v) for v in row] for row in drawn]:
        raise InputError("new and old are of different sequences: their lengths differ.")
    return [
        [_ratios(as_array(after), before, (b, g)) for g, (after, before) in enumerate(zip(*rows, strict=True))]
        for b, rows in enumerate(zip(new.token_logqs, drawn, strict=True))
    ]


def _ratios(after: np.ndarray, before: np.ndarray, place: tuple[int, int]) -> np.ndarray:
    impossible = np.nonzero(~np.isfinite(before))[0]
    if len(impossible):
        raise InputError(
            f"Token {impossible[0]} of response {place} has log q = {before[impossible[0]]} on the side that drew it, "
            "so it has no ratio. Rounding moves a nucleus's boundary; support='replayed' takes the sets it was drawn "
            "from."
        )
    return np.exp(after.astype(np.float64) - before.astype(np.float64))


@dataclass(frozen=True)
class RatioSummary:
    """Token ratios q′ / q of some sequences in single numbers.

    Attributes:
        support: the sets that q′ was taken on.
        num_tokens: how many tokens.
        share_outside: share of them with a ratio outside [0.9, 1.1].
        num_impossible: how many have ratio 0, because they lie outside the set.
        max_deviation: the largest |log ratio| of the others, nats.
        num_sequences: how many sequences.
        effective_sample_size: (Σw)² / Σw² of the sequences' weights, the products of their ratios.
    """

    support: Support
    num_tokens: int
    share_outside: float
    num_impossible: int
    max_deviation: float
    num_sequences: int
    effective_sample_size: float


def ratio_summary(new: LogprobResults, old: LogprobResults | BatchedSequences) -> RatioSummary:
    """The ratios of `token_ratios` in single numbers; NaN where there is no token.

    Args:
        new: as in `token_ratios`.
        old: as in `token_ratios`.
    """
    nested = token_ratios(new, old)
    ratios = np.concatenate([values for row in nested for values in row])
    possible = ratios[ratios > 0]
    with np.errstate(divide="ignore"):
        sums = np.array([[np.log(values).sum() for values in row] for row in nested])
    healthy = (ratios >= HEALTHY[0]) & (ratios <= HEALTHY[1])
    return RatioSummary(
        support=new.support,
        num_tokens=len(ratios),
        share_outside=float((~healthy).mean()) if len(ratios) else math.nan,
        num_impossible=len(ratios) - len(possible),
        max_deviation=float(np.abs(np.log(possible)).max()) if len(possible) else math.nan,
        num_sequences=sums.size,
        effective_sample_size=ImportanceWeights(sums, math.nan, False).effective_sample_size,
    )


@dataclass(frozen=True)
class RatioHealth:
    """Ratios of a pass's log q to the sampler's: before and after replaying the sampler's supports.

    Attributes:
        recomputed: with q on the nuclei of the pass itself.
        replayed: with q on the sets that the tokens were drawn from.
        num_flipped: tokens at which the two sets differ: whose boundary has moved.
    """

    recomputed: RatioSummary
    replayed: RatioSummary
    num_flipped: int

    @classmethod
    def of(cls, recomputed: LogprobResults, replayed: LogprobResults, sequences: BatchedSequences) -> "RatioHealth":
        """From two passes over the same sequences, the second with its flips counted."""
        flips = replayed.support_flips or []
        return cls(
            ratio_summary(recomputed, sequences),
            ratio_summary(replayed, sequences),
            sum(int(values.sum()) for row in flips for values in row),
        )

    def to_frame(self) -> "pd.DataFrame":
        """Two rows, recomputed and replayed, with a column for each figure."""
        import pandas as pd

        return pd.DataFrame([vars(self.recomputed), vars(self.replayed)])
