"""Numbers of every type in arguments that take one: the right meaning, or an error that names argument and value."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.experiment.measurements._checks import check_doses
from steerlab.experiment.measurements.metrics import value_of
from steerlab.experiment.measurements.selection import list_tries
from steerlab.steering.positions import schedule

unchecked = pytest.mark.usefixtures("unchecked_types")

VECTOR = sl.SteeringVector.from_tensor(torch.arange(1.0, 65.0), layer=1)
PAIRS = sl.ContrastPairs.from_lists(["a", "b", "c", "d"], ["e", "f", "g", "h"])
W = sl.where

# name → a function of the engine and a number, which gives something that equal numbers must give alike
NUMBERS = {
    "add coef": lambda e, x: sl.Plan(sl.add(VECTOR, coef=x)).hash,
    "add dose": lambda e, x: sl.Plan(sl.add(VECTOR, dose=x)).hash,
    "set": lambda e, x: sl.Plan(sl.set(VECTOR, x)).hash,
    "clamp lo": lambda e, x: sl.Plan(sl.clamp(VECTOR, x, 9.0)).hash,
    "clamp hi": lambda e, x: sl.Plan(sl.clamp(VECTOR, -9.0, x)).hash,
    "rotate": lambda e, x: sl.Plan(sl.rotate(VECTOR, toward=SteeringAway, angle=x)).hash,
    "plan.scaled": lambda e, x: sl.Plan(sl.add(VECTOR, coef=1.0)).scaled(x).hash,
    "vector.scaled": lambda e, x: VECTOR.scaled(x).hash,
    "when above": lambda e, x: sl.Plan(sl.add(VECTOR, coef=1.0, when=sl.when(VECTOR, above=x))).hash,
    "schedule": lambda e, x: sl.Plan(sl.add(VECTOR, coef=1.0, schedule=schedule.linear(x, 1.0, over=3))).hash,
    "temperature": lambda e, x: sl.SamplingPolicy(temperature=x),
    "top_p": lambda e, x: sl.SamplingPolicy(top_p=x),
    "min_p": lambda e, x: str(sl.SamplingPolicy(min_p=x)),
    "repetition_penalty": lambda e, x: str(sl.SamplingPolicy(repetition_penalty=x)),
    "GenerationConfig": lambda e, x: str(sl.GenerationConfig(temperature=x, top_p=x)),
    "doses of an effect": lambda e, x: check_doses([x, 9.0]),
    "doses to select from": lambda e, x: [t.dose for t in list_tries(VECTOR, [x])],
    "fraction": lambda e, x: PAIRS.split(x)[0].hash,
    "hook": lambda e, x: sl.create_steering_hook(torch.ones(4), x).alpha,
    "metric": lambda e, x: value_of(lambda positive, negative: x, np.ones(1), np.ones(1), 0),
}
SteeringAway = sl.SteeringVector.from_tensor(torch.ones(64), layer=1)
HALVES = [
    np.float32(0.5),
    np.array(0.5),
    torch.tensor(0.5),
    torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
    Decimal("0.5"),
    Fraction(1, 2),
]
NO_NUMBERS = ["0.5", None, math.nan, math.inf, 10**400, 1j, [0.5, 0.6], np.array([0.5]), torch.tensor([0.5]), object()]
BOOLS = [True, np.True_, torch.tensor(True)]


@unchecked
@pytest.mark.parametrize("name", NUMBERS)
def test_equal_numbers_mean_the_same(name):
    expected = NUMBERS[name](None, 0.5)
    assert [NUMBERS[name](None, half) for half in HALVES] == [expected] * len(HALVES)


@unchecked
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused(name):
    for wrong in NO_NUMBERS + (BOOLS if name != "metric" else []):  # a comparison is a metric of 0 and 1
        if (name.startswith("clamp") and wrong is None) or (wrong == math.inf and name.startswith("clamp")):
            continue  # no bound
        if wrong is None and name in ("when above", "add coef", "add dose", "set"):
            continue  # not given
        with pytest.raises(sl.SteerlabError):
            NUMBERS[name](None, wrong)


@unchecked
@pytest.mark.parametrize("name", [n for n in NUMBERS if n not in ("fraction", "top_p", "repetition_penalty")])
def test_zero_has_no_sign(name):
    if name in ("GenerationConfig", "doses to select from"):
        return
    assert NUMBERS[name](None, -0.0) == NUMBERS[name](None, 0) == NUMBERS[name](None, np.float32(-0.0))


INTEGERS = {
    "max_new_tokens": lambda e, i: [c.token_ids for c in e.generate([[5, 6]], max_new_tokens=i)],
    "n": lambda e, i: [c.token_ids for c in e.generate([[5, 6]], max_new_tokens=1, n=i)],
    "seed": lambda e, i: [c.token_ids for c in e.generate([[5, 6]], max_new_tokens=3, seed=i)],
    "one seed a prompt": lambda e, i: [c.token_ids for c in e.generate([[5, 6]], max_new_tokens=3, seed=[i])],
    "batch_size": lambda e, i: [c.token_ids for c in e.generate([[5, 6]], max_new_tokens=1, batch_size=i)],
    "layers": lambda e, i: e.capture([[5, 6]], layers=i).layers,
    "a list of layers": lambda e, i: e.capture([[5, 6]], layers=[i]).layers,
    "a prompt's id": lambda e, i: e.generate([[5, i]], max_new_tokens=1).prompt_token_ids,
    "a target's id": lambda e, i: e.score([[5]], [[[i]]]).log_prob.tolist(),
    "from_tensor": lambda e, i: sl.SteeringVector.from_tensor(torch.ones(4), layer=i).hash,
    "vector.at": lambda e, i: VECTOR.at(i).hash,
    "index": lambda e, i: sl.Plan(sl.add(VECTOR, coef=1.0, where=W.index(i))).hash,
    "ids": lambda e, i: sl.Plan(sl.add(VECTOR, coef=1.0, where=W.ids(i))).hash,
    "after": lambda e, i: sl.Plan(sl.add(VECTOR, coef=1.0, where=W.generated(after=i))).hash,
    "until": lambda e, i: sl.Plan(sl.add(VECTOR, coef=1.0, where=W.generated(until=i))).hash,
    "occurrence": lambda e, i: sl.Plan(sl.add(VECTOR, coef=1.0, where=W.span("a", occurrence=i))).hash,
    "over": lambda e, i: sl.Plan(sl.add(VECTOR, coef=1.0, schedule=schedule.linear(1.0, 0.0, over=i))).hash,
    "top_k": lambda e, i: sl.SamplingPolicy(top_k=i),
    "Controls": lambda e, i: sl.Controls(random=0, shuffled=0, wrong_layer=False) if i is None else _quiet(i),
    "GenerationConfig": lambda e, i: str(sl.GenerationConfig(num_return_sequences=i, max_new_tokens=i)),
    "max_directions": lambda e, i: SteeringConfig((1,), max_directions=i).to_json(),
    "split seed": lambda e, i: PAIRS.split(0.5, seed=i)[0].hash,
    "take": lambda e, i: PAIRS.take([i]).hash,
    "stride": lambda e, i: sl.perplexity(e, [5, 6, 7, 8, 9], context_length=4, stride=i).nll,
    "hooked_generate": lambda e, i: sl.hooked_generate(
        e.model, torch.tensor([[5, 6]]), i, [], seed=i, top_k=i, stop_token_ids=[i]
    ).tolist(),
}
TWOS = [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2), torch.tensor(2, dtype=torch.int16)]
NO_INTEGERS = [2.0, np.float64(2), "2", Decimal(2), math.nan, 1j, [[2]], np.array([[2]]), object(), *BOOLS]


def _quiet(count):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sl.Controls(random=count, shuffled=count)


@unchecked
@pytest.mark.parametrize("name", INTEGERS)
def test_equal_integers_mean_the_same(tiny_llama_engine, name):
    expected = INTEGERS[name](tiny_llama_engine, 2)
    assert [INTEGERS[name](tiny_llama_engine, two) for two in TWOS] == [expected] * len(TWOS)


@unchecked
@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_no_integer_is_refused(tiny_llama_engine, name):
    for wrong in NO_INTEGERS:
        with pytest.raises(sl.SteerlabError):
            INTEGERS[name](tiny_llama_engine, wrong)


IDS = [[5, 6, 7], [8, 9, 10]]


@unchecked
@pytest.mark.parametrize(
    "prompts",
    [
        np.array(IDS),
        torch.tensor(IDS),
        [np.array(IDS[0]), torch.tensor(IDS[1], dtype=torch.int32)],
        [[np.int64(i) for i in IDS[0]], [torch.tensor(i) for i in IDS[1]]],
        (row for row in IDS),
        pd.Series(IDS, index=[4, 2]),
        [range(5, 8), range(8, 11)],
        tuple(map(tuple, IDS)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_prompts_of_every_library(tiny_llama_engine, prompts):
    made = tiny_llama_engine.generate(prompts, max_new_tokens=2)
    assert made.prompt_token_ids == ((5, 6, 7), (8, 9, 10))


@unchecked
@pytest.mark.parametrize(
    "ids", [np.array(IDS[0]), torch.tensor(IDS[0]), range(5, 8), (i for i in IDS[0])], ids=lambda v: type(v).__name__
)
def test_one_bare_prompt_of_ids_with_bare_targets(tiny_llama_engine, ids):
    expected = tiny_llama_engine.score([IDS[0]], [[[8], [9, 10]]]).log_prob
    assert np.array_equal(tiny_llama_engine.score(ids, [np.array([8]), torch.tensor([9, 10])]).log_prob, expected)


@unchecked
@pytest.mark.parametrize(
    "targets", [np.array([[[8]], [[9]]]), torch.tensor([[[8]], [[9]]]), iter([[[8]], [[9]]]), ([[8]], (range(9, 10),))]
)
def test_targets_of_every_library(tiny_llama_engine, targets):
    expected = tiny_llama_engine.score(IDS, [[[8]], [[9]]]).log_prob
    assert np.array_equal(tiny_llama_engine.score(IDS, targets).log_prob, expected)


@unchecked
def test_records_of_arrays_are_the_same_data():
    plain = [
        {"prompt": [5, 6], "target": [7], "label": 1, "group": 3},
        {"prompt": [5, 6], "target": [8], "label": -1, "group": 3},
    ]
    arrays = [
        {"prompt": np.array([5, 6]), "target": torch.tensor([7]), "label": np.int64(1), "group": torch.tensor(3)},
        {"prompt": torch.tensor([5, 6]), "target": np.array([8]), "label": torch.tensor(-1.0), "group": np.int8(3)},
    ]
    assert sl.Targets.from_records(arrays).hash == sl.Targets.from_records(plain).hash
    for wrong in (np.True_, torch.tensor(True), math.nan, np.array([1]), "1", 0.5):
        with pytest.raises(sl.DataError, match="label"):
            sl.Targets.from_records([{"prompt": "a", "target": "b", "label": wrong}])


@unchecked
def test_pairs_of_arrays_are_the_same_data():
    plain = sl.ContrastPairs.from_lists([[5, 6]], [[7, 8]], groups=[1])
    given = sl.ContrastPairs.from_lists(np.array([[5, 6]]), torch.tensor([[7, 8]]), groups=torch.tensor([1]))
    assert given.hash == plain.hash
    assert given.split is not None
    with pytest.raises(sl.DataError, match="by a list of their indices"):
        PAIRS.take(np.array([True, False, True, False]))


@unchecked
@pytest.mark.parametrize(
    "values",
    [
        np.arange(1.0, 65.0),
        np.arange(1, 65),
        list(range(1, 65)),
        torch.arange(1.0, 65.0, dtype=torch.float64),
        pd.Series(range(1, 65)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_vectors_of_every_library(values):
    assert sl.SteeringVector.from_tensor(values, layer=np.int64(1)) == VECTOR


@unchecked
@pytest.mark.parametrize(
    "values",
    [
        torch.ones(4, dtype=torch.bool),
        torch.ones(4, dtype=torch.complex64),
        ["a", "b"],
        [True, False],
        {1, 2},
        "ab",
        torch.ones(2, 4),
    ],
    ids=str,
)
def test_what_is_no_row_is_refused(values):
    with pytest.raises(sl.VectorShapeError, match=r"\[d_model\], got"):
        sl.SteeringVector.from_tensor(values, layer=1)


def test_annotations_take_numbers_of_every_library():
    """With the type checks of the other tests: what is documented as a number takes NumPy's and torch's."""
    half, two = np.float32(0.5), torch.tensor(2)
    vector = sl.SteeringVector.from_tensor(np.ones(4), layer=two).at(np.int64(3)).scaled(half)
    where = W.generated(after=two, until=np.int64(3)) | W.index(np.int64(1), two) | W.span("a", occurrence=two)
    options = {"where": where, "schedule": schedule.linear(half, half, over=two), "when": sl.when(vector, above=half)}
    plan = sl.Plan(sl.add(vector, coef=half, **options), sl.clamp(vector, half, torch.tensor(1.5))).scaled(half)
    assert plan.hash == sl.Plan.from_json(plan.to_json()).hash
    assert sl.VectorSet((vector,))[np.int64(3)] == vector


@unchecked
def test_positions_are_taken_one_by_one_or_as_an_array():
    assert W.index(np.array([0, 2])) == W.index([0, 2]) == W.index(0, 2)
    assert W.ids(torch.tensor([7, 9])) == W.ids(7, 9)


@unchecked
def test_an_experiment_measures_equal_numbers_once(tiny_llama_engine):
    exp = sl.Experiment("numbers", model=tiny_llama_engine, root=None, seed=np.int64(3))
    records = [
        {"prompt": np.array([5, 6]), "target": np.array([7]), "label": 1},
        {"prompt": [5, 6], "target": [8], "label": -1},
    ]
    targets, plan = sl.Targets.from_records(records), sl.Plan(sl.add(VECTOR, coef=np.float32(0.5)))
    controls = sl.Controls(random=np.int64(0))
    first = exp.effect(plan, targets, [0, 1], controls=controls, neutral=[[5, 6, 7]])
    cells = exp._session.cells.measured
    same = sl.Plan(sl.add(VECTOR, coef=Fraction(1, 2)))
    for doses, bound in ((torch.tensor([0.0, 1.0]), np.float32(1.5)), ((dose for dose in (0, 1)), Fraction(3, 2))):
        options = {"controls": controls, "neutral": np.array([[5, 6, 7]]), "max_ppl_ratio": bound}
        second = exp.effect(same, targets, doses, **options)
        assert (second.slope, exp._session.cells.measured) == (first.slope, cells)
    numbers = {"doses": np.array([0, 1]), "max_new_tokens": torch.tensor(2), "n": np.int64(1), "chat": np.bool_(False)}
    rows = exp.generate(plan, np.array([[5, 6]]), **numbers)
    again = exp.generate(same, [[5, 6]], doses=[0.0, 1.0], max_new_tokens=2, n=1)
    assert [list(row) for row in rows.token_ids] == [list(row) for row in again.token_ids]
    for bound in (np.float32(50), 50):
        best = exp.select(
            VECTOR, np.array([0.5]), targets, subject_to={"ppl_ratio": bound}, texts=np.array([[5, 6, 7]])
        )
        assert best.subject_to == {"ppl_ratio": 50.0}
    assert len(exp.results.selections) == 1
    pairs = sl.ContrastPairs.from_lists([[5, 6], [7, 9]], [[5, 8], [7, 10]])
    assert exp.extract(pairs, layers=np.array([1]), chat=np.bool_(False)) is exp.extract(pairs, layers=[1])
    found = exp.interaction(plan, sl.Plan(sl.add(VECTOR, coef=2.0)), targets, np.array([0, 1]), range(2))
    assert found.grid().shape == (2, 2)
    exp.cost(
        plan, np.array([[5, 6, 7]]), doses=(0, np.float64(1)), prompts=np.array([[5, 6]]), max_new_tokens=np.int64(2)
    )


FLAGS = {
    "chat": lambda e, x: e.generate("Hi", max_new_tokens=1, chat=x).prompt_token_ids,
    "score_eos": lambda e, x: e.score("Hi", [" a"], score_eos=x).log_prob.tolist(),
    "wrong_layer": lambda e, x: sl.Controls(random=0, wrong_layer=x),
    "rb_requires_grad": lambda e, x: sl.GenerationConfig(rb_requires_grad=x),
    "do_sample": lambda e, x: sl.hooked_generate(e.model, torch.tensor([[5]]), 2, [], do_sample=x, seed=1).tolist(),
    "use_cache": lambda e, x: sl.hooked_generate(e.model, torch.tensor([[5]]), 2, [], use_cache=x, seed=1).tolist(),
}


@unchecked
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_true_or_false(tiny_llama_engine, name):
    for flag in (True, False):
        expected = FLAGS[name](tiny_llama_engine, flag)
        for same in (np.bool_(flag), torch.tensor(flag)):
            assert FLAGS[name](tiny_llama_engine, same) == expected
    for wrong in (1, 0.0, "no", "False", None, np.int64(1), [True]):
        with pytest.raises(sl.InputError, match=f"{name}.* is True or False, got"):
            FLAGS[name](tiny_llama_engine, wrong)
