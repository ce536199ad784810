import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from steerlab.steering.extraction._moments import Scatter


def scatter_of(rows, *cuts):
    found = Scatter()
    for part in np.split(np.arange(rows.shape[1]), cuts):
        if len(part):
            found.add(rows[:, part])
    return found


def draw(n_layers, n, d, seed=0):
    return torch.randn(n_layers, n, d, generator=torch.Generator().manual_seed(seed)) + 0.5


def same_axis(a, b, tolerance=1e-9):
    return bool(((a * b).sum(dim=-1).abs() - 1).abs().max() < tolerance)


def test_worked_by_hand():
    found = scatter_of(torch.tensor([[[3.0, 1.0], [3.0, -1.0]]]))
    assert found.mean.tolist() == [[3.0, 0.0]]
    assert found.second_moment(0).tolist() == [[9.0, 0.0], [0.0, 1.0]]
    assert found.axes()[0].abs().tolist() == pytest.approx([1.0, 0.0])
    assert found.centred_axes()[0].abs().tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("n", [3, 8, 30])
def test_axes_are_those_of_scikit_learn_and_of_the_singular_values(n):
    rows = draw(3, n, 8)
    found = scatter_of(rows, n // 2)
    for layer in range(3):
        plain = rows[layer].double().numpy()
        centred = torch.from_numpy(PCA(1).fit(plain).components_[0])
        uncentred = torch.from_numpy(np.linalg.svd(plain, full_matrices=False)[2][0])
        assert same_axis(found.centred_axes()[layer], centred)
        assert same_axis(found.axes()[layer], uncentred)


@given(st.integers(1, 24), st.lists(st.integers(0, 24), max_size=4))
def test_chunks_do_not_matter(n, cuts):
    rows = draw(2, n, 6, seed=n)
    whole, cut = scatter_of(rows), scatter_of(rows, *sorted(min(c, n) for c in cuts))
    torch.testing.assert_close(cut.mean, whole.mean)
    torch.testing.assert_close(cut.second_moment(1), whole.second_moment(1))
    assert same_axis(cut.axes(), whole.axes(), 1e-6)


def test_memory_stops_growing():
    def held(n_chunks):
        found = Scatter()
        for seed in range(n_chunks):
            found.add(draw(2, 4, 16, seed))
        kept = [found._outer, found._sum, *found._rows]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor is not None)

    assert held(2) < held(5) == held(50) == 2 * (16 * 16 + 16) * 8


def test_small_spread_of_large_rows_survives():
    rows = torch.full((1, 40, 4), 3e3)
    rows[0, :, 2] += torch.linspace(-0.5, 0.5, 40)
    assert scatter_of(rows, 7).centred_axes()[0].abs().tolist() == pytest.approx([0, 0, 1, 0], abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 20])
def test_no_axis_where_nothing_varies(n):
    rows = torch.stack([torch.ones(n, 4), torch.zeros(n, 4)])
    found = scatter_of(rows)
    assert found.centred_axes().isnan().all()
    assert found.axes()[0].abs().tolist() == pytest.approx([0.5] * 4)
    assert found.axes()[1].isnan().all()
