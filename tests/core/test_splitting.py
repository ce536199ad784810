import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core._splitting import check_no_leak, split_groups
from steerlab.core.errors import DataError


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30), st.floats(0.05, 0.95), st.integers(0, 9))
def test_parts_are_disjoint_complete_and_divide_no_group(groups, fraction, seed):
    try:
        left, right = split_groups(groups, fraction, seed)
    except DataError:
        return
    assert left
    assert right
    assert sorted(left + right) == list(range(len(groups)))
    assert not {groups[i] for i in left} & {groups[i] for i in right}


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 2, True, "half", None, float("nan")])
def test_a_fraction_is_between_0_and_1(fraction):
    with pytest.raises(DataError, match="between 0 and 1"):
        split_groups(["a", "b"], fraction, 0)


@pytest.mark.parametrize(
    "prompt", ["text", [1, 2], [{"role": "user", "content": "hi"}], [{"content": "hi", "role": "user"}]]
)
def test_the_same_prompt_in_both_parts_is_a_leak(prompt):
    other = [dict(reversed(m.items())) for m in prompt] if isinstance(prompt[0], dict) else prompt
    check_no_leak([prompt, "a"], ["b"])
    with pytest.raises(DataError, match="both parts"):
        check_no_leak([prompt, "a"], ["b", other])
