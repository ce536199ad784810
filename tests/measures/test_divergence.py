import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.measures import kl

rows = st.lists(st.floats(-20, 20, width=32), min_size=5, max_size=5).map(lambda row: torch.tensor([row]))


def test_equals_scipy():
    p, q = (torch.randn(4, 30, dtype=torch.float64) for _ in range(2))
    expected = scipy.stats.entropy(p.softmax(-1).numpy(), q.softmax(-1).numpy(), axis=-1)
    torch.testing.assert_close(kl(p, q), torch.tensor(expected))


def test_infinite_where_q_lacks_a_token_of_p_and_never_nan():
    some, other = torch.tensor([0.0, 0.0, -math.inf]), torch.tensor([0.0, -math.inf, -math.inf])
    assert kl(some, other).item() == math.inf
    assert kl(other, some).item() == pytest.approx(math.log(2), abs=1e-6)
    assert kl(other, torch.tensor([-math.inf, -math.inf, 0.0])).item() == math.inf


def test_disjoint_in_practice_is_finite():
    assert kl(torch.tensor([100.0, -100.0]), torch.tensor([-100.0, 100.0])).item() == pytest.approx(200, abs=1e-3)


@given(rows, rows, st.floats(-100, 100, width=32))
def test_never_negative_and_zero_for_equals(p, q, shift):
    assert kl(p, q).item() >= 0
    assert kl(p, p + shift).item() == pytest.approx(0, abs=1e-4)
