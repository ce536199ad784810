import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.steering.extraction.head_ranking import _clustered, held_out_accuracy

THINGS = ["ferry", "harbour", "window", "clock", "soup", "street"]
PAIRS = sl.ContrastPairs.from_lists(
    [f"{start} {thing} was wonderful" for thing in THINGS for start in ("The", "My")],
    [f"{start} {thing} was terrible" for thing in THINGS for start in ("The", "My")],
    [thing for thing in THINGS for _ in range(2)],
)


@pytest.fixture(scope="module")
def ranking(tiny_llama_engine):
    return sl.rank_heads(tiny_llama_engine, PAIRS, layers=[1, -1], folds=3)


def test_standard_error_worked_by_hand():
    """Group a has both right, group b one of two: means 1 and 0.5 about 0.75."""
    accuracy, se = _clustered(np.array([True, True, False, True]), np.array(["a", "a", "b", "b"]))
    assert (accuracy, se) == (0.75, pytest.approx(0.25))


def test_accuracy_is_that_of_a_loop_over_folds():
    rng = torch.Generator().manual_seed(0)
    positive, negative = (torch.randn(12, 5, generator=rng) + shift for shift in (0.6, 0.0))
    groups = [str(k // 2) for k in range(12)]
    x, y = torch.cat([positive, negative]).double().numpy(), np.repeat([1, 0], 12)
    right = []
    for fit, held in GroupKFold(3).split(x, y, [*groups, *groups]):
        mean, std = x[fit].mean(axis=0), x[fit].std(axis=0)
        probe = LogisticRegression(max_iter=5000).fit((x[fit] - mean) / std, y[fit])
        right += (probe.predict((x[held] - mean) / std) == y[held]).tolist()
    assert held_out_accuracy(positive, negative, groups, 3)[0] == pytest.approx(np.mean(right))


def test_what_only_fits_is_not_counted():
    """Noise in as many dimensions as rows separates the rows of a fit perfectly, and says nothing of others."""
    rng = torch.Generator().manual_seed(1)
    positive, negative = torch.randn(2, 40, 100, generator=rng)
    x, y = torch.cat([positive, negative]).numpy(), np.repeat([1, 0], 40)
    assert LogisticRegression(max_iter=5000).fit(x, y).score(x, y) == 1.0
    assert held_out_accuracy(positive, negative, [str(k) for k in range(40)], 5)[0] < 0.65


def test_ranked_by_what_heads_hold(tiny_llama_engine, ranking):
    frame = ranking.to_frame()
    assert list(frame.columns) == ["layer", "head", "accuracy", "se"]
    assert sorted(zip(frame.layer, frame["head"], strict=True)) == [(n, h) for n in (1, 3) for h in range(4)]
    assert frame.accuracy.is_monotonic_decreasing
    assert ranking.best(2) == list(zip(frame.layer[:2], frame["head"][:2], strict=True))
    sides = [
        tiny_llama_engine.capture(side, layers=[1, 3], site="z", where=sl.where.last_prompt(), pool="mean")
        for side in (PAIRS.positives, PAIRS.negatives)
    ]
    for row in frame.itertuples():
        positive, negative = (side[row.layer][:, row.head] for side in sides)
        assert row.accuracy == held_out_accuracy(positive, negative, PAIRS.groups, 3)[0]
        theta = torch.nn.functional.normalize(positive.mean(dim=0) - negative.mean(dim=0), dim=0)
        sigma = np.std((torch.cat([positive, negative]) @ theta).numpy())
        torch.testing.assert_close(ranking.shifts[row.layer, row.head], float(sigma) * theta, atol=1e-6, rtol=1e-4)


def test_vectors_of_the_best_heads_are_sums_by_layer(tiny_llama_engine, ranking):
    vectors = ranking.vectors(tiny_llama_engine, 5)
    for layer, vector in vectors.items():
        heads = [head for n, head in ranking.best(5) if n == layer]
        total = sum(ranking.shifts[layer, head] @ tiny_llama_engine.head_outputs(layer)[head] for head in heads)
        torch.testing.assert_close(vector.values, total)
        assert vector.site == "attn_out"
    assert sum(len([n for n, _ in ranking.best(5) if n == layer]) for layer in vectors) == 5
    plan = sl.Plan(*(sl.add(v, coef=5.0) for v in vectors.values()))
    scores = [tiny_llama_engine.score(["The ferry was"], [[" quiet"]], plan=p).log_prob[0] for p in (plan, None)]
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_held_out_is_refused(tiny_llama_engine, ranking):
    with pytest.raises(DataError, match=r"7 folds need 7 groups.*12 pairs are in 6"):
        sl.rank_heads(tiny_llama_engine, PAIRS, folds=7)
    twice = sl.ContrastPairs.from_lists(["a b", "a b"], ["c d", "e f"])
    with pytest.raises(DataError, match="stands in the groups '0' and '1'"):
        sl.rank_heads(tiny_llama_engine, twice, folds=2)
    with pytest.raises(InputError, match="There are 8 heads, and k=9"):
        ranking.best(9)
    with pytest.raises(InputError, match="weights at hand"):
        sl.rank_heads(object(), PAIRS)
