import numpy as np
import pytest

from steerlab.core._seeds import check_seed, draw_keys, row_key
from steerlab.core.errors import InputError


def test_draws_are_a_function_of_the_key_alone():
    assert np.array_equal(draw_keys((3, 1, 0), 5), draw_keys((3, 1, 0), 5))
    assert not np.array_equal(draw_keys((3, 1, 0), 5), draw_keys((3, 0, 1), 5))


def test_first_draws_do_not_depend_on_how_many_are_made():
    assert np.array_equal(draw_keys((7, 0, 2), 100)[:3], draw_keys((7, 0, 2), 3))


def test_draws_are_uniform():
    draws = np.concatenate([draw_keys((0, i, 0), 10) for i in range(500)])
    assert np.histogram(draws, bins=10, range=(-(2.0**63), 2.0**63))[0].min() > 400


def test_a_list_of_seeds_forgets_the_prompts_place():
    assert row_key(5, 0, 1) == row_key([9, 9, 5], 2, 1)
    assert row_key(5, 1, 0) != row_key(5, 0, 0)


def test_keys_of_distinct_rows_give_distinct_draws():
    keys = [(seed, i, g) for seed in (0, 1, 2, 2**32, 2**32 + 1, 2**40) for i in range(3) for g in range(3)]
    firsts = {int(draw_keys(key, 1)[0]) for key in keys}
    assert len(firsts) == len(keys)


@pytest.mark.parametrize("seed", [-1, 1.0, True, "0", None, [0, -1], [0, "1"]])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(InputError):
        check_seed(seed, 2)


def test_one_seed_per_prompt():
    with pytest.raises(InputError, match="3 seeds for 2 prompts"):
        check_seed([1, 2, 3], 2)


def test_seeds_of_prompts_are_in_order():
    with pytest.raises(InputError, match="A seed is an integer"):
        check_seed({1, 2}, 2)
