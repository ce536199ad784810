import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.measures.overlap import jaccard, kept_share

sets = st.lists(st.booleans(), min_size=6, max_size=6)


def test_worked_by_hand():
    # row 1: {0,1} against {1,2,3}: 1 of 2 kept, 1 of 4 in either; row 2: disjoint; row 3: equal
    a = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0]]).bool()
    b = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0]]).bool()
    assert kept_share(a, b).tolist() == [0.5, 0.0, 1.0]
    assert jaccard(a, b).tolist() == [0.25, 0.0, 1.0]


def test_empty_sets_are_missing():
    empty, some = torch.zeros(3).bool(), torch.tensor([True, False, False])
    assert math.isnan(kept_share(empty, some).item())
    assert math.isnan(jaccard(empty, empty).item())
    assert kept_share(some, empty).item() == 0


@given(sets, sets)
def test_equals_python_sets(a, b):
    left, right = ({i for i, inside in enumerate(row) if inside} for row in (a, b))
    found = jaccard(torch.tensor(a), torch.tensor(b)).item()
    kept = kept_share(torch.tensor(a), torch.tensor(b)).item()
    assert (
        math.isnan(found)
        if not left | right
        else math.isclose(found, len(left & right) / len(left | right), rel_tol=1e-6)
    )
    assert math.isnan(kept) if not left else math.isclose(kept, len(left & right) / len(left), rel_tol=1e-6)
    assert math.isnan(kept) or math.isnan(found) or found <= kept + 1e-6
