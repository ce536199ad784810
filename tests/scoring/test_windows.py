from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core.errors import InputError, PlanError
from steerlab.scoring.windows import (
    WindowSizes,
    check_streamed_positions,
    sliding_windows,
    stream_windows,
    window_sizes,
)

sizes = st.integers(2, 40).flatmap(lambda c: st.tuples(st.integers(1, 120), st.just(c), st.integers(1, c)))


@given(sizes, st.booleans())
def test_each_token_is_scored_once_within_the_context(size, score_first):
    n_tokens, context, stride = size
    windows = sliding_windows(n_tokens, context, stride, score_first=score_first)
    scored = [k for w in windows for k in range(w.first_scored, w.stop)]
    assert scored == list(range(0 if score_first else 1, n_tokens))
    assert all(w.stop - w.start <= context for w in windows)
    for window in windows[1:]:
        assert 1 <= window.stop - window.first_scored <= stride
        assert window.start < window.first_scored
        assert window.stop - window.start == context


def test_the_documented_example():
    windows = sliding_windows(10, 4, 2)
    assert [(w.start, w.first_scored, w.stop) for w in windows] == [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]


@pytest.mark.parametrize(
    ("context", "stride"), [(1, 1), (0, 1), (4, 0), (4, 5), (4, -1), (4, 1.5), (4.0, 2), (True, 1)]
)
def test_bad_windows_are_refused(context, stride):
    with pytest.raises(InputError):
        sliding_windows(10, context, stride)


@given(sizes, st.booleans(), st.integers(1, 50), st.data())
def test_streaming_gives_the_same_windows(size, score_first, longest_piece, data):
    n_tokens, context, stride = size
    ids = list(range(1000, 1000 + n_tokens))
    pieces = []
    while sum(map(len, pieces)) < n_tokens:
        start = sum(map(len, pieces))
        pieces.append(ids[start : start + data.draw(st.integers(1, longest_piece))])
    found = list(stream_windows(pieces, context, stride, score_first=score_first))
    whole = sliding_windows(n_tokens, context, stride, score_first=score_first)
    assert found == [replace(window, ids=tuple(ids[window.start : window.stop])) for window in whole]


def test_streaming_reads_no_further_than_it_must():
    read = []

    def pieces():
        for start in range(0, 100, 5):
            read.append(start)
            yield list(range(start, start + 5))

    windows = stream_windows(pieces(), 10, 5)
    next(windows)
    assert read == [0, 5]
    next(windows)
    assert read == [0, 5, 10]


def test_default_sizes(tiny_llama_engine, tiny_gpt2_engine):
    assert window_sizes([tiny_llama_engine, tiny_gpt2_engine]) == WindowSizes(256, 256)
    assert window_sizes([tiny_llama_engine], at_most=40) == WindowSizes(40, 40)
    assert window_sizes([tiny_llama_engine], 100, at_most=40) == WindowSizes(100, 100)
    bos = tiny_llama_engine.tokenizer.bos_token_id
    sizes = window_sizes([tiny_llama_engine], 20, 20, bos_each_window=True)
    assert sizes == WindowSizes(20, 20, (bos,))
    assert sizes.inner == (19, 19)
    with pytest.raises(InputError, match="exceeds the model's context of 256"):
        window_sizes([tiny_llama_engine], 257)


VECTOR = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)


@pytest.mark.parametrize("where", [None, sl.where.all(), sl.where.prompt() | sl.where.generated()])
def test_plans_that_a_streamed_text_allows(where):
    edit = sl.add(VECTOR, coef=1.0) if where is None else sl.add(VECTOR, coef=1.0, where=where)
    check_streamed_positions(sl.Plan(edit), WindowSizes(32, 16))
    check_streamed_positions(sl.Plan(edit), WindowSizes(32, 32, (0,)))


@pytest.mark.parametrize(
    "where",
    [
        sl.where.index(3),
        sl.where.index(10**6),
        sl.where.index(-1),
        ~sl.where.index(0),
        sl.where.generated(after=1),
        sl.where.generated(until=5),
        sl.where.prompt(),
        sl.where.generated(),
        sl.where.span("cat"),
    ],
)
def test_plans_that_a_streamed_text_cannot_keep(where):
    with pytest.raises(PlanError, match="windows"):
        check_streamed_positions(sl.Plan(sl.add(VECTOR, coef=1.0, where=where)), WindowSizes(32, 16))
