"""Repetition and diversity of texts, on sequences of tokens or words."""

import math
from collections.abc import Hashable, Sequence
from itertools import chain


def ngrams(tokens: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    """Every run of n neighbouring tokens, in order; none if there are fewer than n.

    Raises:
        ValueError: for n below 1.

    Examples:
        >>> ngrams("abc", 2)
        [('a', 'b'), ('b', 'c')]
    """
    if n < 1:
        raise ValueError(f"An n-gram has at least one token, got n={n}.")
    return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]


def repeated_share(tokens: Sequence[Hashable], n: int = 4) -> float:
    """Share of one text's n-grams that have occurred in it before: 1 − distinct / all.

    Args:
        tokens: token ids, or words.
        n: length of an n-gram.

    Returns:
        0 for a text that never repeats itself, near 1 for one that loops; NaN for a text of fewer than n tokens.

    Source:
        Welleck et al. 2020 (arXiv:1908.04319), "seq-rep-n".

    Examples:
        >>> repeated_share("ababab", 2)  # ab ba ab ba ab
        0.6
    """
    found = ngrams(tokens, n)
    return 1 - len(set(found)) / len(found) if found else math.nan


def distinct_n(texts: Sequence[Sequence[Hashable]], n: int) -> float:
    """Distinct n-grams over all n-grams, of many texts together.

    It falls with the amount of text, so compare only sets of equal size.

    Args:
        texts: token ids or words of each text.
        n: length of an n-gram.

    Returns:
        1 if no n-gram occurs twice; NaN if no text has n tokens.

    Source:
        Li et al. 2016 (arXiv:1510.03055), section 5.2; n-grams are counted in the denominator.

    Examples:
        >>> distinct_n(["ab", "abc"], 2)
        0.6666666666666666
    """
    found = list(chain.from_iterable(ngrams(tokens, n) for tokens in texts))
    return len(set(found)) / len(found) if found else math.nan
