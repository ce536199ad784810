import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core.policy import SamplingPolicy
from steerlab.measures._top_p import top_p_edges
from steerlab.measures.nucleus import _edges_by_sort, nucleus, nucleus_edges, up_to_edge


def by_sort(logits, policy):
    return _edges_by_sort(logits / policy.temperature, policy)


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.95, 0.999, 0.99999])
def test_equals_the_sort(spread, top_p):
    logits = spread * torch.randn(12, 20_000, generator=torch.Generator().manual_seed(1))
    policy = SamplingPolicy(temperature=0.8, top_p=top_p)
    assert torch.equal(nucleus_edges(logits, policy), by_sort(logits, policy))


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.95])
def test_equals_the_sort_where_half_precision_makes_ties(top_p):
    logits = (3 * torch.randn(24, 20_000, generator=torch.Generator().manual_seed(2))).to(torch.bfloat16)
    policy = SamplingPolicy(top_p=top_p)
    rows, sure = top_p_edges(logits.float(), top_p)
    assert sure.float().mean() > 0.5  # the fast way is really taken
    assert torch.equal(rows[sure], by_sort(logits.float(), policy)[sure])
    assert torch.equal(nucleus_edges(logits, policy), by_sort(logits.float(), policy))


@given(st.data())
def test_equals_the_sort_on_rows_of_few_values(data):
    levels = data.draw(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=4))
    counts = data.draw(st.lists(st.integers(1, 700), min_size=len(levels), max_size=len(levels)))
    order = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    row = torch.cat(
        [torch.full((n,), level) for level, n in zip(levels, counts, strict=True)] + [torch.full((3000,), -30.0)]
    )
    row = row[torch.randperm(len(row), generator=order)][None]
    policy = SamplingPolicy(top_p=data.draw(st.floats(0.01, 0.999)))
    assert torch.equal(nucleus_edges(row, policy), by_sort(row, policy))


def test_a_boundary_within_rounding_is_left_to_the_sort():
    row = torch.full((1, 5000), -60.0)
    row[0, [10, 20]] = torch.tensor([0.5, 0.5]).log()
    _, sure = top_p_edges(row, 0.5)
    assert not sure.item()
    assert nucleus(row, SamplingPolicy(top_p=0.5)).nonzero()[:, 1].tolist() == [10]


def test_impossible_tokens_and_hopeless_rows():
    row = torch.full((2, 5000), -torch.inf)
    row[0, 7] = 1.0
    assert nucleus(row, SamplingPolicy(top_p=0.9)).sum(dim=-1).tolist() == [1, 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.floats(0.01, 1), st.integers(0, 5), st.floats(0, 1))
def test_the_edge_gives_the_set_back(row, top_p, top_k, min_p):
    logits = torch.tensor([row], dtype=torch.float32)
    policy = SamplingPolicy(top_p=top_p, top_k=top_k, min_p=min_p)
    edges = nucleus_edges(logits, policy)
    if edges is None:
        assert nucleus(logits, policy).all()
    else:
        assert torch.equal(up_to_edge(logits, edges), nucleus(logits, policy))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spread", [0.05, 3.0])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.999])
def test_equals_the_sort_on_a_gpu(spread, top_p):
    """But for one token at the edge, where the sort's running float32 sum cannot tell."""
    logits = spread * torch.randn(700, 20_000, generator=torch.Generator().manual_seed(1)).cuda()
    policy = SamplingPolicy(temperature=0.8, top_p=top_p)
    found, expected = (up_to_edge(logits / 0.8, edges(logits, policy)).sum(-1) for edges in (nucleus_edges, by_sort))
    assert (found - expected).abs().max() <= 1
    assert (found == expected).float().mean() > 0.9
