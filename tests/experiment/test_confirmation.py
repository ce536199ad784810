"""Case X4: what a sweep found is confirmed on held-out items; a second look is recorded."""

import math

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._report.document import document
from steerlab.experiment.measurements.confirmation import confirm
from steerlab.experiment.measurements.selection import select


def targets(prompts, groups=None):
    return sl.Targets.from_records(
        [
            {"prompt": prompt, "target": target, "label": label, "group": group}
            for prompt, group in zip(prompts, groups or [None] * len(prompts), strict=True)
            for target, label in [(" ran", 1), (" flew off", -1)]
        ]
    )


DEV = targets(["the cat", "a dog", "the bird"])
TEST = targets(["a fish", "the old clock", "my brother", "the ferry"])


@pytest.fixture(scope="module")
def best(tiny_llama_engine):
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return select(tiny_llama_engine, sl.SteeringVector.from_tensor(values, layer=1), [-0.3, 0.3], DEV)


@pytest.fixture(scope="module")
def first(tiny_llama_engine, best):
    return confirm(tiny_llama_engine, best, TEST, seed=2)


def test_the_gain_is_that_of_held_out_items(tiny_llama_engine, best, first):
    margins = []
    for plan in (None, best.plan):
        scores = tiny_llama_engine.score(TEST.prompts, [item.targets for item in TEST], plan=plan).log_prob
        margins.append(scores[0::2] - scores[1::2])
    change = margins[1] - margins[0]
    assert first.gain == pytest.approx(change.mean(), abs=1e-5)
    assert first.rows.change.to_numpy() == pytest.approx(change, abs=1e-5)
    assert first.anti_steerable == np.mean(change < 0)
    assert first.low <= first.gain <= first.high
    assert first.dev_gain == best.gain
    assert first.num_items == 4
    assert (first.look, first.overlap) == (1, 0)
    assert first.plan_hash == best.plan.hash


def test_a_second_look_is_counted_and_said(tiny_llama_engine, best, first):
    second = confirm(tiny_llama_engine, best, TEST, earlier=[first])
    third = confirm(tiny_llama_engine, best, TEST.take([3, 0]), earlier=[first, second])  # some of the same items
    elsewhere = confirm(tiny_llama_engine, best, targets(["a quiet street"]), earlier=[first, second])
    assert (second.look, third.look, elsewhere.look) == (2, 3, 1)
    assert "look 2 at these held-out items" in str(second)
    assert "look" not in str(first)


@pytest.mark.parametrize(
    ("on", "count"),
    [
        (targets(["a fish", "a dog"]), 1),
        (targets(["a fish", " a dog "]), 1),  # the same prompt apart from space
        (targets(["a fish", "my brother"], ["a dog", "x"]), 1),  # another prompt of a development group
        (DEV, 3),
    ],
)
def test_items_seen_in_the_selection_are_refused(tiny_llama_engine, best, on, count):
    with pytest.raises(DataError, match=f"{count} of {len(on)} held-out items share prompt or group"):
        confirm(tiny_llama_engine, best, on)
    allowed = confirm(tiny_llama_engine, best, on, allow_overlap=True)
    assert allowed.overlap == count
    assert f"{count} of {len(on)} items share" in str(allowed)


def test_nulls_rank_the_gain(tiny_llama_engine, best, first):
    found = confirm(tiny_llama_engine, best, TEST, controls=sl.Controls(random=19, wrong_layer=True), seed=2)
    draws = found.nulls[found.nulls.family == "random"].gain.abs()
    assert len(draws) == 19
    assert found.null_ranks == {"random": (1 + (draws >= abs(found.gain)).sum()) / 20}
    assert found.gain == pytest.approx(first.gain, abs=1e-5)
    assert "against random" in str(found)
    assert "No null family" in str(first)


def test_one_group_has_no_interval_and_says_so(tiny_llama_engine, best):
    found = confirm(tiny_llama_engine, best, targets(["a fish", "my brother"], ["x", "x"]))
    assert math.isnan(found.low)
    assert "no interval" in str(found)


def test_a_function_must_be_passed_again(tiny_llama_engine):
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))

    def first_positive(positive, negative):
        return float(positive[0])

    own = select(tiny_llama_engine, sl.SteeringVector.from_tensor(values, layer=1), [0.3], DEV, metric=first_positive)
    with pytest.raises(InputError, match="metric 'first_positive' is a function; pass it again"):
        confirm(tiny_llama_engine, own, TEST)
    assert confirm(tiny_llama_engine, own, TEST, metric=first_positive).metric == "first_positive"


def test_functions_of_one_name_are_told_apart(tiny_llama_engine):
    vector = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(0)), layer=1)
    first, last = (lambda positive, negative: float(positive[0])), (lambda positive, negative: -float(negative[-1]))
    own = select(tiny_llama_engine, vector, [0.3], DEV, metric=first)
    same, other = (str(confirm(tiny_llama_engine, own, TEST, metric=metric)) for metric in (first, last))
    assert f"({own.gain:+.3f} on development items)" in same
    assert f"{own.gain:+.3f}" not in other
    assert "selected by another function named <lambda>" in other

    def choice_prob(positive, negative):
        return float(positive[0])

    shadowing = select(tiny_llama_engine, vector, [0.3], DEV, metric=choice_prob)
    with pytest.raises(InputError, match="is a function; pass it again"):
        confirm(tiny_llama_engine, shadowing, TEST)


def test_a_gain_in_another_metric_is_not_put_beside_it(tiny_llama_engine, best, first):
    found = confirm(tiny_llama_engine, best, TEST, metric="choice_prob")
    report = str(document(Material("x", 0, confirmations=[found])))
    assert (found.metric, found.dev_metric, found.dev_gain) == ("choice_prob", "log_prob_margin", best.gain)
    for text in (str(found), report):
        assert f"{best.gain:+.3f}" not in text
        assert "The plan was selected by log_prob_margin" in text
    assert f"({best.gain:+.3f} on development items)" in str(first)
    assert "was selected by" not in str(first)
    assert f"({best.gain:+.3f} on development items)" in str(document(Material("x", 0, confirmations=[first])))
