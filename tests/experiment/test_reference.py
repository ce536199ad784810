"""The main job on the real model: the shipped sentiment vector has an effect.

That it is the one that its pairs give shows `tests/steering/test_shipped_vector.py`.

That a vector without signal has none is shown, and asserted, by the notebook *An honest null*.
"""

import pytest

import steerlab as sl
from steerlab.core.shipped import shipped_vectors

DOSES = [-0.2, 0.0, 0.2]


@pytest.fixture(scope="module")
def targets() -> sl.Targets:
    """One prompt of each of four groups."""
    whole = sl.Targets.from_jsonl(shipped_vectors() / "sentiment" / "targets.jsonl", split="test")
    return whole.take([index for index, item in enumerate(whole) if item.group not in whole.groups[:index]][:4])


@pytest.mark.slow
def test_sentiment_everywhere_is_steep_and_beyond_random_directions(
    lens_engine: sl.LensEngine, targets: sl.Targets
) -> None:
    exp = sl.Experiment("everywhere", lens_engine, root=None)
    vector = sl.SteeringVector.load(shipped_vectors() / "sentiment" / "sentiment.safetensors")
    plan = sl.Plan(sl.add(vector, dose=1.0, where=sl.where.all()))
    neutral = sl.shipped.neutral_text().split("\n\n")[:1]
    effect = exp.effect(plan, targets, DOSES, controls=sl.Controls(random=19), neutral=neutral)
    assert effect.verdict == "effect", effect.reasons
    assert 17 < effect.slope < 28
    assert effect.ci[0] > 0
    assert effect.anti_steerable == 0
    assert effect.null_slopes.slope.abs().max() < effect.rank_slope / 2
