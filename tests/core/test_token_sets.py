import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steerlab.core.errors import InputError
from steerlab.core.token_sets import BITS, DROPPED, KEPT, TokenSets


@given(st.integers(1, 40).flatmap(lambda width: arrays(bool, st.tuples(st.integers(1, 6), st.just(width)))))
def test_what_goes_in_comes_out(inside):
    sets = TokenSets.of_masks(inside)
    np.testing.assert_array_equal(sets.masks(), inside)
    np.testing.assert_array_equal(sets.sizes, inside.sum(axis=1))
    assert [ids.tolist() for ids in sets] == [np.nonzero(row)[0].tolist() for row in inside]
    assert TokenSets.from_bytes(sets.to_bytes()) == sets
    assert TokenSets.joined([sets[:2], sets[2:]]) == sets
    order = np.arange(len(sets))[::-1]
    np.testing.assert_array_equal(sets.take(order).masks(), inside[::-1])
    assert sets.nbytes <= len(inside) * -(-inside.shape[1] // 8)


@pytest.mark.parametrize(("d_vocab", "width"), [(50_000, 2), (150_000, 4)])
def test_each_set_takes_the_shortest_form(d_vocab, width):
    generator = np.random.default_rng(0)
    inside = np.stack([generator.random(d_vocab) < share for share in (1e-4, 0.5, 1 - 1e-4, 1.0)])
    sets = TokenSets.of_masks(inside)
    assert sets.kinds.tolist() == [KEPT, BITS, DROPPED, DROPPED]
    few, missing = int(inside[0].sum()), int((~inside[2]).sum())
    assert sets.lengths.tolist() == [width * few, -(-d_vocab // 8), width * missing, 0]
    np.testing.assert_array_equal(sets.masks(), inside)


def test_sets_that_need_no_mask():
    assert TokenSets.everything(3, 7) == TokenSets.of([range(7)] * 3, 7)
    assert TokenSets.everything(3, 7).nbytes == 0
    assert TokenSets.singletons([4, 0], 7) == TokenSets.of([[4], [0]], 7)
    assert "2 steps of 7 tokens, 4 bytes" in repr(TokenSets.singletons([4, 0], 7))
    assert TokenSets.everything(3, 7) != TokenSets.everything(3, 8)
    assert TokenSets.joined([TokenSets.everything(0, 0), TokenSets.everything(1, 7)]).d_vocab == 7


def test_what_is_refused():
    with pytest.raises(InputError, match="support holds token 7, the vocabulary 7"):
        TokenSets.of([[7]], 7)
    with pytest.raises(InputError, match=r"one vocabulary can be joined, got \[7, 8\]"):
        TokenSets.joined([TokenSets.everything(1, 7), TokenSets.everything(1, 8)])
    with pytest.raises(InputError, match="of 1 steps have 1 lengths, of 3 bytes together, and 0 bytes"):
        TokenSets(7, np.zeros(1, np.uint8), np.array([3]), np.zeros(0, np.uint8))
