"""Distributions over the ratings of a judge: from log-probabilities of labels to probabilities, and aggregates."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float
from scipy.special import entr

Aggregate = Callable[[np.ndarray], np.ndarray]
"""From ratings, shape [..., parts], to one figure per row, shape [...]."""

MAX_COMBINATIONS: Final = 200_000
"""Combinations of ratings that an expected aggregate sums over at most."""


def rating_probs(
    log_probs: Float[np.ndarray, " labels"], token_ids: Sequence[Sequence[int]]
) -> tuple[Float[np.ndarray, " labels"], float]:
    """Probability of each label, given that the text goes on with one of them, and the probability that it does.

    A label whose tokens another label begins with (`1` and `10`, digit by digit) counts without that other one: its
    probability is that of its tokens, less that of every longer label that continues them.

    Args:
        log_probs: log p of each label's tokens, in nats.
        token_ids: the tokens of each label; no two alike.

    Returns:
        Probabilities that sum to 1; and the probability of all labels together before that.

    Raises:
        ValueError: if two labels have the same tokens.

    Examples:
        >>> rating_probs(np.log([0.5, 0.2]), [[1], [1, 0]])  # 0.5 − 0.2 and 0.2
        (array([0.6, 0.4]), 0.5)
    """
    ids = [tuple(row) for row in token_ids]
    if len(set(ids)) < len(ids):
        raise ValueError(f"Two labels have the same tokens, so nothing tells them apart: {ids}.")
    top = log_probs.max()
    shares = np.exp(log_probs - top)  # a longer label never exceeds the one it continues, so nothing overflows
    own = shares.copy()
    for longer, tokens in enumerate(ids):
        shorter = [k for k, other in enumerate(ids) if len(other) < len(tokens) and tokens[: len(other)] == other]
        if shorter:
            own[max(shorter, key=lambda k: len(ids[k]))] -= shares[longer]
    own = np.maximum(own, 0.0)  # rounding alone can bring it below
    return own / own.sum(), float(np.exp(top + np.log(own.sum())))


def rating_entropy(probs: Float[np.ndarray, "*rows labels"]) -> Float[np.ndarray, "*rows"]:
    """Entropy of distributions over ratings, in nats.

    Examples:
        >>> rating_entropy(np.array([[1.0, 0.0], [0.5, 0.5]])).round(3)
        array([0.   , 0.693])
    """
    return entr(probs).sum(axis=-1)


def harmonic_mean(ratings: Float[np.ndarray, "*rows parts"]) -> Float[np.ndarray, "*rows"]:
    """Harmonic mean over the last axis; 0 if any part is 0.

    Source: Wu et al. 2025 (AxBench), section 4.2, for three ratings from 0 to 2.

    Raises:
        ValueError: for a negative rating.

    Examples:
        >>> harmonic_mean(np.array([[2.0, 1.0, 1.0], [2.0, 0.0, 2.0]]))
        array([1.2, 0. ])
    """
    if (ratings < 0).any():
        raise ValueError(f"A harmonic mean takes no negative rating, got {float(ratings.min()):g}.")
    zero = (ratings == 0).any(axis=-1)
    inverse = 1 / np.where(ratings == 0, 1.0, ratings)
    return np.where(zero, 0.0, ratings.shape[-1] / inverse.sum(axis=-1))


def mean(ratings: Float[np.ndarray, "*rows parts"]) -> Float[np.ndarray, "*rows"]:
    """Arithmetic mean over the last axis."""
    return ratings.mean(axis=-1)


AGGREGATES: Final[dict[str, Aggregate]] = {"harmonic_mean": harmonic_mean, "mean": mean}


def expected_aggregate(
    probs: Float[np.ndarray, "rows parts labels"], values: Float[np.ndarray, " labels"], aggregate: Aggregate
) -> Float[np.ndarray, " rows"]:
    """What an aggregate of ratings is on average if every part's rating is drawn from its own distribution.

    The exact sum over all combinations of ratings. An aggregate of expected ratings is another figure: a part that is
    rated 0 nine times out of ten makes nine tenths of the harmonic means 0.

    Args:
        probs: the distribution of each part's rating.
        values: what each label counts.
        aggregate: e.g. `harmonic_mean`.

    Raises:
        ValueError: for more combinations than `MAX_COMBINATIONS`.

    Examples:
        >>> sure, unsure = [0.0, 0.0, 1.0], [0.9, 0.0, 0.1]
        >>> expected_aggregate(np.array([[sure, unsure]]), np.array([0.0, 1.0, 2.0]), harmonic_mean).round(3)
        array([0.2])
    """
    _, parts, labels = probs.shape
    if labels**parts > MAX_COMBINATIONS:
        raise ValueError(
            f"{parts} ratings of {labels} labels have {labels**parts} combinations; at most {MAX_COMBINATIONS} are "
            "summed. Use fewer rubrics or a shorter scale."
        )
    drawn = np.array(list(itertools.product(range(labels), repeat=parts)))
    total = np.zeros(len(probs))
    for combination, figure in zip(drawn, aggregate(values[drawn]), strict=True):
        total += figure * probs[:, np.arange(parts), combination].prod(axis=1)
    return total
