import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerlab.measures.texts import distinct_n, ngrams, repeated_share

tokens = st.lists(st.integers(0, 4), max_size=30)


def test_worked_by_hand():
    # "the cat the cat the": bigrams tc ct tc ct, two of four seen before; unigrams t c t c t, three of five
    text = "the cat the cat the".split()
    assert ngrams(text, 2) == [("the", "cat"), ("cat", "the")] * 2
    assert repeated_share(text, 2) == 0.5
    assert repeated_share(text, 1) == pytest.approx(3 / 5)
    assert repeated_share(text, 5) == 0
    # pooled: bigrams tc ct tc ct | tc cd : 3 distinct of 6
    assert distinct_n([text, ["the", "cat", "dog"]], 2) == 0.5


def test_too_short_is_missing_not_zero():
    assert math.isnan(repeated_share([1, 2], 3))
    assert math.isnan(distinct_n([[1], []], 2))
    assert distinct_n([[1], [1, 2]], 2) == 1
    with pytest.raises(ValueError, match="at least one token"):
        ngrams([1, 2], 0)


@given(tokens, st.integers(1, 4))
def test_equals_a_count_with_a_counter(text, n):
    counts = Counter(zip(*(text[k:] for k in range(n)), strict=False))
    total = sum(counts.values())
    expected = sum(count - 1 for count in counts.values()) / total if total else math.nan
    assert repeated_share(text, n) == pytest.approx(expected, nan_ok=True)
    assert distinct_n([text], n) == pytest.approx(1 - expected, nan_ok=True)


@given(st.lists(tokens, min_size=1, max_size=5), st.integers(1, 3))
def test_doubling_the_texts_halves_diversity(texts, n):
    once = distinct_n(texts, n)
    assert distinct_n(texts * 2, n) == pytest.approx(once / 2, nan_ok=True)
    assert distinct_n(texts[::-1], n) == pytest.approx(once, nan_ok=True)
