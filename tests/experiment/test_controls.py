import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.experiment.measurements.controls import (
    Controls,
    LabelFlips,
    _wrong_layer,
    control_arms,
    moved_plan,
    random_plan,
)

PAIRS = sl.ContrastPairs.from_lists(
    ["the cat ran home", "a dog sat down", "the bird flew off", "a fish swam by"],
    ["the cat ran away", "a dog stood up", "the bird came back", "a fish swam on"],
    ["x", "x", "y", "y"],
)


@pytest.fixture(scope="module")
def vector(tiny_llama_engine: sl.LensEngine) -> sl.SteeringVector:
    return sl.extract(tiny_llama_engine, PAIRS, layers=[1])[1]


def test_random_directions_keep_norm_and_strength(vector: sl.SteeringVector) -> None:
    plan = sl.Plan(sl.add(vector, dose=0.5))
    other = random_plan(plan, np.random.default_rng(0))
    assert other.edits[0].vector.norm == pytest.approx(vector.norm, rel=1e-5)
    assert abs(other.edits[0].vector.cosine(vector)) < 0.6
    assert other.edits[0].operator == plan.edits[0].operator
    assert other.edits[0].median_norm == plan.edits[0].median_norm


def test_draws_differ_and_repeat(tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector) -> None:
    plan = sl.Plan(sl.add(vector, coef=1.0))

    def hashes(seed: int) -> list[str]:
        arms = control_arms(tiny_llama_engine, plan, Controls(random=19, shuffled=19), pairs=PAIRS, seed=seed)
        return [arm.plan.hash for arm in arms]

    assert hashes(0) == hashes(0)
    assert len(set(hashes(0)[:19])) == 19
    assert not set(hashes(0)[:19]) & set(hashes(1)[:19])


def test_label_flips_equal_extraction_from_flipped_pairs(
    tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector
) -> None:
    from steerlab.core.contrast_pairs import balanced_flips

    flips = balanced_flips(PAIRS.groups, np.random.default_rng(5))
    direct = sl.extract(tiny_llama_engine, PAIRS.flipped(flips), layers=[1])[1]
    drawn = LabelFlips(tiny_llama_engine, sl.Plan(sl.add(vector, coef=1.0)), PAIRS).plan(np.random.default_rng(5))
    found = drawn.edits[0].vector
    assert found.cosine(direct) == pytest.approx(1.0, abs=1e-5)
    assert found.norm == pytest.approx(vector.norm, rel=1e-5)
    for group in ("x", "y"):
        assert sum(f for f, g in zip(flips, PAIRS.groups, strict=True) if g == group) == 1


def test_the_wrong_layer_measures_its_own_dose(tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector) -> None:
    with pytest.warns(UserWarning, match="extracted at"):
        plan = moved_plan(tiny_llama_engine, sl.Plan(sl.add(vector, dose=0.5))).check(tiny_llama_engine.info)
    assert plan.edits[0].hook_point.layer == 2
    assert plan.edits[0].median_norm == tiny_llama_engine.median_norm(2)


def test_the_wrong_layer_is_neither_the_same_nor_the_last() -> None:
    assert [_wrong_layer(layer, 30) for layer in (0, 1, 2, 14, 29)] == [15, 16, 1, 7, 14]
    for n_layers in range(2, 12):
        for layer in range(n_layers):
            assert _wrong_layer(layer, n_layers) in set(range(n_layers)) - {layer}
            assert n_layers < 4 or _wrong_layer(layer, n_layers) < n_layers - 1


def test_shuffling_needs_the_pairs(tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector) -> None:
    with pytest.raises(DataError, match="pairs="):
        control_arms(tiny_llama_engine, sl.Plan(sl.ablate(vector)), Controls(shuffled=20), pairs=None, seed=0)


def test_shuffling_needs_a_known_method(tiny_llama_engine: sl.LensEngine) -> None:
    given = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
    with pytest.raises(DataError, match="made by 'given'"):
        control_arms(tiny_llama_engine, sl.Plan(sl.ablate(given)), Controls(shuffled=20), pairs=PAIRS, seed=0)


def test_other_pairs_are_noticed(tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector) -> None:
    with pytest.warns(UserWarning, match="not those"):
        LabelFlips(tiny_llama_engine, sl.Plan(sl.ablate(vector)), PAIRS.take([0, 1]))


def test_too_few_draws_are_announced() -> None:
    with pytest.warns(UserWarning, match="at least 19"):
        Controls(random=20, shuffled=5)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("count", [-1, 2.5, True])
def test_counts_are_checked(count: object) -> None:
    with pytest.raises(InputError, match="≥ 0"):
        Controls(random=count)  # pyright: ignore[reportArgumentType]


def test_flips_of_chat_vectors_read_chats_again(tiny_llama_engine: sl.LensEngine) -> None:
    pairs = sl.ContrastPairs.from_lists(["good day", "fine sun", "nice soup"], ["bad day", "foul rain", "vile soup"])
    vector = sl.extract(tiny_llama_engine, pairs, layers=1, chat=True)[1]
    flips = LabelFlips(tiny_llama_engine, sl.Plan(sl.add(vector, coef=1.0)), pairs)
    acts = flips._acts[vector.hash]
    torch.testing.assert_close((acts.positive[1] - acts.negative[1]).mean(dim=0), vector.values)
