import math

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.experiment.measurements.cost import perplexity_cost
from steerlab.experiment.measurements.entropy import entropy_change
from steerlab.experiment.measurements.selection import TRY_COLUMNS, choose, list_tries, select
from steerlab.steering.vectors import VectorSet

DEV = sl.Targets.from_records(
    [
        {"prompt": prompt, "target": target, "label": label}
        for prompt in ("the cat", "a dog", "the bird")
        for target, label in [(" ran", 1), (" sat down", 1), (" flew off", -1)]
    ]
)
TEXTS = ["the cat ran home and the dog sat down", "a bird flew off"]


def vector(layer, seed=0, name=None):
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=layer, name=name)


@pytest.fixture(scope="module")
def vectors():
    return VectorSet((vector(1), vector(2)))


@pytest.fixture(scope="module")
def found(tiny_llama_engine, vectors):
    bounds = {"ppl_ratio": 50.0, "entropy_change": 5.0, "anti_steerable": 1.0}
    return select(tiny_llama_engine, vectors, [-0.3, 0.3], DEV, subject_to=bounds, texts=TEXTS)


def test_every_try_is_in_the_table(found):
    assert isinstance(found.table.index, pd.RangeIndex)
    assert list(found.table.columns) == [*TRY_COLUMNS, "satisfied", "chosen"]
    assert found.table[["layer", "dose"]].to_numpy().tolist() == [[1, -0.3], [1, 0.3], [2, -0.3], [2, 0.3]]
    assert found.table.chosen.sum() == 1
    assert found.gain == found.table.gain.max()
    assert "best of 4 tries, of which 4 satisfy" in str(found)


def test_figures_equal_those_measured_apart(found, tiny_llama_engine, vectors):
    plan = sl.Plan(sl.add(vectors[2], dose=1.0)).scaled(0.3)
    row = found.table.iloc[3]
    margins = []
    for arm in (None, plan):
        scores = tiny_llama_engine.score(DEV.prompts, [item.targets for item in DEV], plan=arm)
        by_item = scores.log_prob.reshape(3, 3)
        margins.append(by_item[:, :2].mean(axis=1) - by_item[:, 2])
    assert row.gain == pytest.approx((margins[1] - margins[0]).mean(), abs=1e-5)
    assert (row.base_value, row.value) == (pytest.approx(margins[0].mean()), pytest.approx(margins[1].mean(), abs=1e-5))
    assert row.anti_steerable == np.mean(margins[1] < margins[0])
    cost = perplexity_cost(tiny_llama_engine, plan, TEXTS, [1.0])
    assert row.ppl_ratio == pytest.approx(cost.ppl_ratio[0], rel=1e-4)
    rows = entropy_change(tiny_llama_engine, plan, TEXTS, sl.SamplingPolicy(temperature=0.7, top_p=0.9))
    assert row.entropy_change == pytest.approx((rows.steered - rows.base).mean(), abs=1e-4)
    assert row.plan_hash == plan.hash
    assert row.vector_hash == vectors[2].hash


def test_the_plan_found_is_the_one_tried(found):
    row = found.table[found.table.chosen].iloc[0]
    assert found.plan.hash == row.plan_hash
    assert (found.layer, found.dose, found.gain) == (row.layer, row.dose, row.gain)
    assert found.on_hash == DEV.hash


def test_what_is_not_constrained_is_not_measured(tiny_llama_engine, vectors):
    free = select(tiny_llama_engine, vectors, [0.3], DEV, layers=[2])
    assert free.table[["ppl_ratio", "entropy_change"]].isna().all().all()
    assert free.layer == 2
    assert str(free).endswith("best of 1 try, with no constraint")


def test_a_constraint_changes_the_winner(tiny_llama_engine, found, vectors):
    bound = {"ppl_ratio": float(found.table.ppl_ratio.min()) * 1.0001}
    strict = select(tiny_llama_engine, vectors, [-0.3, 0.3], DEV, subject_to=bound, texts=TEXTS)
    assert strict.table.satisfied.sum() == 1
    assert strict.table.ppl_ratio[strict.table.chosen].iloc[0] == strict.table.ppl_ratio.min()


def test_nothing_satisfies_names_the_closest(tiny_llama_engine, found, vectors):
    closest = found.table.loc[found.table.ppl_ratio.idxmin()]
    with pytest.raises(InputError, match=f"Closest: .* at layer {closest.layer}, dose {closest.dose:g}"):
        select(tiny_llama_engine, vectors, [-0.3, 0.3], DEV, subject_to={"ppl_ratio": 0.01}, texts=TEXTS)


# --- the choice alone ------------------------------------------------------------------------------------------------


def table(rows):
    """Rows of (dose, gain, ppl_ratio, entropy_change, anti_steerable)."""
    filled = [("v", 1, dose, gain, 0.0, gain, ratio, shift, anti, "p", "h") for dose, gain, ratio, shift, anti in rows]
    return pd.DataFrame(filled, columns=TRY_COLUMNS)


def chosen(rows, **subject_to):
    tries = list_tries(vector(1), [row[0] for row in rows])
    return choose(tries, table(rows), DEV, metric="log_prob_margin", subject_to=subject_to)


def test_the_largest_gain_within_the_bounds_wins():
    rows = [
        (0.1, 1.0, 1.05, 0.1, 0.0),
        (0.2, 3.0, 1.3, 0.1, 0.0),
        (0.3, 2.0, 1.08, -0.9, 0.0),
        (0.4, 1.5, 1.1, 0.2, 0.4),
    ]
    assert chosen(rows).dose == 0.2
    assert chosen(rows, ppl_ratio=1.1).dose == 0.3
    assert chosen(rows, ppl_ratio=1.1, entropy_change=0.5).dose == 0.4  # a fall of 0.9 counts like a rise
    assert chosen(rows, ppl_ratio=1.1, entropy_change=0.5, anti_steerable=0.1).dose == 0.1
    assert chosen(rows, ppl_ratio=1.05).table.satisfied.tolist() == [True, False, False, False]


def test_ties_go_to_the_cheaper_then_the_smaller_then_the_earlier():
    assert chosen([(0.3, 1.0, 1.2, 0, 0), (0.2, 1.0, 1.1, 0, 0), (-0.1, 1.0, 1.15, 0, 0)]).dose == 0.2
    unmeasured = [(0.3, 1.0, math.nan, 0, 0), (-0.2, 1.0, math.nan, 0, 0), (0.2, 1.0, math.nan, 0, 0)]
    assert chosen(unmeasured).dose == -0.2
    assert chosen([unmeasured[0], unmeasured[2], unmeasured[1]]).dose == 0.2


def test_closest_is_by_relative_excess_over_all_bounds():
    rows = [(0.1, 1.0, 1.2, 0.0, 0.9), (0.2, 1.0, 1.6, 0.0, 0.2)]  # excess: 0.2/1 + 0.7/0.2 = 3.7 and 0.6
    with pytest.raises(InputError, match=r"dose 0\.2, with ppl_ratio 1\.6 \(bound 1\), anti_steerable 0\.2"):
        chosen(rows, ppl_ratio=1.0, anti_steerable=0.2)


def test_tries_come_from_vectors_sets_and_names():
    one, two = vector(1, name="mood"), vector(2)
    assert [(t.name, t.vector.layer, t.dose) for t in list_tries(one, [0.1, 0.2])] == [
        ("mood", 1, 0.1),
        ("mood", 1, 0.2),
    ]
    named = list_tries({"a": VectorSet((one, two)), "b": vector(3)}, [1], layers=range(2, 4))
    assert [(t.name, t.vector.layer) for t in named] == [("a", 2), ("b", 3)]
    assert [t.name for t in list_tries([one, two], [1])] == ["mood", "given"]
    ablating = list_tries(one, [0.5], make=lambda v: sl.Plan(sl.ablate(v)))
    assert ablating[0].plan == sl.Plan(sl.ablate(one)).scaled(0.5)


@pytest.mark.parametrize("doses", [[], [0.0, 0.1], [0.1, 0.1], [math.nan]])
def test_doses_that_are_no_tries_are_refused(doses):
    with pytest.raises(InputError, match="Doses"):
        list_tries(vector(1), doses)


def test_layers_may_be_counted_from_the_end(tiny_llama_engine, vectors):
    last = tiny_llama_engine.info.n_layers - 1
    ends = VectorSet((vector(last),))
    assert select(tiny_llama_engine, ends, [0.1], DEV, layers=[-1]).layer == last
    with pytest.raises(sl.HookPointError, match="Layer -9 does not exist"):
        select(tiny_llama_engine, vectors, [0.1], DEV, layers=[-9])


def test_input_that_cannot_be_searched_is_refused(tiny_llama_engine, vectors):
    with pytest.raises(InputError, match=r"layers \[7\]; there are vectors for \[1, 2\]"):
        list_tries(vectors, [0.1], layers=[1, 7])
    with pytest.raises(InputError, match="Unknown constraint 'ppl'"):
        select(tiny_llama_engine, vectors, [0.1], DEV, subject_to={"ppl": 1.1})
    with pytest.raises(InputError, match="pass texts="):
        select(tiny_llama_engine, vectors, [0.1], DEV, subject_to={"ppl_ratio": 1.1})
    with pytest.raises(InputError, match="bound on ppl_ratio"):
        select(tiny_llama_engine, vectors, [0.1], DEV, subject_to={"ppl_ratio": math.nan}, texts=TEXTS)
    with pytest.raises(InputError, match="takes steering vectors"):
        list_tries(["mood"], [0.1])
