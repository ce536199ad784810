from hypothesis import given
from hypothesis import strategies as st

from steerlab.core._batching import batches_by_tokens


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_every_index_once_and_within_the_budget(lengths, budget):
    batches = batches_by_tokens(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
