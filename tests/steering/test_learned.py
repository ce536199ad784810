"""Edits learned by gradient: `reft_r1`, `reps`, `loreft`."""

import math

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import DataError, InputError, VectorValueError
from steerlab.engines.toy import ToyEngine
from steerlab.steering.extraction.learned._examples import Examples
from steerlab.steering.extraction.learned._learn import LEARNED
from steerlab.steering.extraction.learned.loreft import Loreft, LoreftSettings
from steerlab.steering.extraction.learned.reft_r1 import ReftR1, ReftR1Settings
from steerlab.steering.extraction.learned.reps import Reps, RepsSettings, reps_loss
from steerlab.steering.extraction.learned.training import Setting, TrainingSettings, item_batches, train

PROMPTS = ["What a", "The soup was", "She was", "The day is", "Nobody", "Two plus", "The bread", "Where did"]
METHODS = ["reft_r1", "reps", "loreft"]
QUICK = {"steps": 12, "batch_size": 4, "evaluate_every": 4, "learning_rate": 0.2, "validation": 0.25}


@pytest.fixture
def targets():
    """Completions that go one way for every prompt."""
    rows = [
        (prompt, text, label) for prompt in PROMPTS for text, label in ((" wonderful day", 1), (" sad evening", -1))
    ]
    return sl.Targets.from_records([{"prompt": p, "target": t, "label": s} for p, t, s in rows])


def setting(engine, targets, layer=1, seed=0, rate=0.1):
    """What a method is made with, for all completions of the targets."""
    listed = [item.targets for item in targets]
    scores = engine.added_vector_scores(
        targets.prompts, listed, HookPoint(layer), sl.where.last_prompt() | sl.where.generated()
    )
    rows = tuple((2 * index,) for index in range(len(targets)))
    other = tuple((2 * index + 1,) for index in range(len(targets)))
    return Setting(scores, rows, other, engine.info.d_model, engine.median_norm(layer), rate, seed)


def made(name, engine, targets, **options):
    make, kind = LEARNED[name]
    return make(setting(engine, targets), kind(**options))


# --- the losses ---------------------------------------------------------------------------------------------------


def test_reps_loss_worked_by_hand():
    # wanted: 2 tokens, log p −6, −8 nulled, −7 plain; unwanted: 4 tokens, −9, −5 nulled, −3 plain
    steered, nulled, plain = torch.tensor([-6.0, -9.0]), torch.tensor([-8.0, -5.0]), torch.tensor([-7.0, -3.0])
    found = reps_loss(steered, nulled, plain, torch.tensor([2.0, 4.0]), [(0, 1, 1.0)])
    gain = 4 / 2 * -6 - -9 / 4  # β⁺ = max(−3 − −7, 1) = 4
    drop = 1 / 4 * -5 - -8 / 2  # β⁻ = max(−7 − −3, 1) = 1
    assert found.item() == pytest.approx(math.log1p(math.exp(-gain)) + math.log1p(math.exp(-drop)), rel=1e-6)


def test_reft_r1_edit_worked_by_hand(tiny_llama_engine, targets):
    method = ReftR1(setting(tiny_llama_engine, targets), ReftR1Settings(top_k=2))
    with torch.no_grad():
        method.direction.zero_()[0] = 3.0  # its length does not count
        method.bias.fill_(-1.0)
    stream = torch.zeros(2, 4, method.direction.numel())
    stream[0, :, 0] = torch.tensor([9.0, 4.0, 2.0, 1.5])
    stream[1, :, 0] = torch.tensor([9.0, -4.0, 0.5, 3.0])
    chosen = torch.tensor([[False, True, True, True], [False, False, False, True]])
    added, rest = method.edit(stream, chosen)
    assert added.shape == (2, 1, stream.shape[-1])
    assert added[:, 0, 0].tolist() == [2.0, 2.0]  # (3 + 1) / 2; one position chosen: its own activation
    assert added[:, 0, 1:].abs().max() == 0
    assert rest.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_slopes(tiny_llama_engine, targets, name):
    method = made(name, tiny_llama_engine, targets, **({"factors": (1.0,)} if name == "reps" else {}))
    items = [0, 2, 5]
    if name == "loreft":  # away from the start, where W = R
        with torch.no_grad():
            method.weight.add_(0.1 * torch.randn(method.weight.shape, generator=torch.Generator().manual_seed(3)))
    parameters = [parameter for group in method.parameter_groups() for parameter in group["params"]]
    gradients = torch.autograd.grad(method.loss(items), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        size = float(gradient.norm())
        assert size > 0
        step = 0.02 * max(float(parameter.detach().norm()), 0.1)
        before, along = parameter.detach().clone(), gradient / size
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(before + sign * step * along)
                ends.append(float(method.loss(items)))
        with torch.no_grad():
            parameter.copy_(before)
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(size, rel=0.05, abs=2e-5 / step)


def test_loreft_starts_at_no_change(tiny_llama_engine, targets):
    method = Loreft(setting(tiny_llama_engine, targets), LoreftSettings(rank=3))
    assert float(method.change(torch.randn(1, 5, method.weight.shape[1])).detach().abs().max()) == 0.0
    with torch.no_grad():
        method.basis.add_(1.0)
        gram = method.rotation() @ method.rotation().T
    torch.testing.assert_close(gram, torch.eye(3), atol=1e-5, rtol=0)


# --- learning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_learning_lowers_the_loss_on_items_never_fitted(tiny_llama_engine, targets, name):
    model = tiny_llama_engine.model.original_model
    model.zero_grad(set_to_none=True)  # the engine is shared
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    vectors = [
        sl.extract(tiny_llama_engine, targets, name, layers=1, name="mood", seed=seed, **QUICK)[1] for seed in (0, 0, 1)
    ]
    assert torch.equal(vectors[0].values, vectors[1].values)
    assert vectors[0].hash == vectors[1].hash
    assert not torch.equal(vectors[0].values, vectors[2].values)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    card = vectors[0].card
    told = card.training
    assert told["held_out_loss"] < 0.95 * told["unsteered_loss"]
    assert told["held_out_loss"] == min(row["held_out_loss"] for row in told["curve"])
    assert (card.method, card.name, card.data_hash) == (name, "mood", targets.hash)
    assert told["steps"] == 12
    assert told["tokens"] > 12 * 4 * 3
    assert told["seconds"] > 0
    assert told["held_out_items"] == 2
    assert told["settings"]["where"] == (sl.where.last_prompt() | sl.where.generated()).to_json()


@pytest.mark.parametrize("name", METHODS)
def test_the_saved_edit_steers_and_comes_back(tiny_llama_engine, targets, name, tmp_path):
    engine = tiny_llama_engine
    vectors = sl.extract(engine, targets, name, layers=1, **QUICK)
    vectors.save(tmp_path / "v.safetensors")
    loaded = sl.VectorSet.load(tmp_path / "v.safetensors")[1]
    assert loaded == vectors[1]
    assert loaded.card == vectors[1].card
    plan = sl.Plan(sl.loreft(loaded) if name == "loreft" else sl.add(loaded, coef=1.0))
    margins = []
    for scale in (0.0, 1.0):
        frame = engine.score(targets.prompts, [i.targets for i in targets], plan=plan.scaled(scale)).to_frame()
        by_item = frame.log_prob.to_numpy().reshape(-1, 2)
        margins.append(by_item[:, 0] if name != "reps" else by_item[:, 0] - by_item[:, 1])
    assert (margins[1] > margins[0] + 1).mean() >= 0.75
    if name == "loreft":  # what was trained is what the plan does
        _, held = Examples(targets.items).split(0.25, 0)
        scores = [engine.score([targets.prompts[i]], [list(targets.items[i].positives)], plan=plan)[0] for i in held]
        loss = -sum(s.log_prob for s in scores) / sum(s.num_tokens for s in scores)
        assert loss == pytest.approx(loaded.card.training["held_out_loss"], abs=1e-4)


@pytest.fixture(scope="module")
def planted(tiny_llama_engine):
    """A direction, and what the model says greedily when a vector along it is added."""
    engine = tiny_llama_engine
    values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(7))
    vector = sl.SteeringVector.from_tensor(values, layer=1)
    plan = sl.Plan(sl.add(vector, dose=1.5))
    prompts = [f"{first} {second}" for first in PROMPTS for second in ("one", "big", "old")]
    policy = sl.SamplingPolicy.greedy()
    arms = [engine.generate(prompts, plan=arm, policy=policy, max_new_tokens=3) for arm in (plan, None)]
    rows = [
        {"prompt": engine.tokenizer(p)["input_ids"], "target": list(row.token_ids), "label": label, "group": p}
        for arm, label in zip(arms, (1, -1), strict=True)
        for p, row in zip(prompts, arm, strict=True)
    ]
    return vector, sl.Targets.from_records(rows)


@pytest.mark.parametrize("name", METHODS)
def test_a_planted_direction_is_found(tiny_llama_engine, planted, name):
    direction, data = planted
    options = {"steps": 60, "batch_size": 6, "learning_rate": 0.2, "patience": 10}
    found = sl.extract(tiny_llama_engine, data, name, layers=1, **options)[1]
    null = 3 / math.sqrt(found.d_model)  # three standard deviations of the cosine of a random direction
    assert found.cosine(direction) > null


def test_training_stops_when_the_held_out_loss_has_stopped_falling(tiny_llama_engine, targets):
    method = made("loreft", tiny_llama_engine, targets)
    settings = TrainingSettings(steps=60, batch_size=2, evaluate_every=1, patience=2, learning_rate=3.0)
    with torch.no_grad():
        start = float(method.held_out_loss([6, 7]))
    found = train(method, range(6), [6, 7], settings, seed=0, name="loreft")
    assert found.stopped_early
    assert found.steps == found.best_step + 2
    losses = [row[2] for row in found.curve]
    assert found.held_out_loss == min(losses) <= start
    with torch.no_grad():
        assert float(method.held_out_loss([6, 7])) == pytest.approx(found.held_out_loss, abs=1e-5)


def test_every_item_comes_once_in_a_round():
    batches = item_batches([3, 4, 5, 6, 7], 2, np.random.default_rng(0))
    rounds = [[next(batches) for _ in range(3)] for _ in range(2)]
    assert all(sorted(item for batch in one for item in batch) == [3, 4, 5, 6, 7] for one in rounds)
    assert rounds[0] != rounds[1]


# --- data and arguments -------------------------------------------------------------------------------------------


def test_records_need_no_unwanted_completion(tiny_llama_engine):
    rows = [{"prompt": prompt, "target": " wonderful day"} for prompt in PROMPTS]
    vector = sl.extract(tiny_llama_engine, rows, "loreft", layers=1, rank=1, **QUICK)[1]
    assert vector.low_rank.rank == 1
    with pytest.raises(DataError, match="item 0 has no unwanted one"):
        sl.extract(tiny_llama_engine, rows, "reps", layers=1, **QUICK)


def test_equal_data_have_equal_hashes(targets):
    rows = targets.to_frame()[["prompt", "target", "label"]].to_dict("records")
    assert Examples.of(rows, "reps").hash == Examples.of(targets, "reps").hash == targets.hash


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("text", "takes Targets, or records"),
        (5, "takes Targets, or records"),
        ([], "no records"),
        ([{"prompt": "a", "target": " b", "label": -1}], "no wanted completion"),
        ([{"prompt": "a", "target": " b"}], "Of 1 group .* another prompt of another group"),
        ([{"prompt": p, "target": " b"} for p in "ac"], r"Of 2 groups .* 0\.2 .* or validation=0\.5"),
        (sl.ContrastPairs.from_lists(["a"], ["b"]), "contrast pairs have none.*Targets, or records"),
    ],
)
def test_data_that_cannot_be_used(tiny_llama_engine, data, message):
    with pytest.raises(DataError, match=message):
        sl.extract(tiny_llama_engine, data, "reft_r1", layers=1)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reft_r1", {"steps": 0}, "steps, got 0"),
        ("reft_r1", {"validation": 1.0}, "validation is the share"),
        ("reft_r1", {"sparsity": -1.0}, "≥ 0 as sparsity"),
        ("reft_r1", {"top_k": 0}, "top_k, got 0"),
        ("reft_r1", {"rank": 2}, "does not know rank; it takes steps"),
        ("reps", {"factors": [1.0, -1.0]}, "numbers > 0 as factors"),
        ("reps", {"factors": []}, "numbers > 0 as factors"),
        ("reps", {"start": 0.0}, "> 0 as start"),
        ("loreft", {"rank": 1.5}, "rank, got 1.5"),
        ("loreft", {"rank": 10_000}, "at most the width"),
        ("loreft", {"learning_rate": math.nan}, "learning_rate, got nan"),
        ("loreft", {"read": sl.where.all()}, "with where=, not read="),
        ("loreft", {"layers": "all"}, "one layer at a time"),
    ],
)
def test_arguments_that_cannot_be_used(tiny_llama_engine, targets, name, options, message):
    with pytest.raises(InputError, match=message):
        sl.extract(tiny_llama_engine, targets, name, **{"layers": 1, **options})


def test_an_engine_without_gradients_is_refused(targets):
    with pytest.raises(InputError, match="ToyEngine does not give; use"):
        sl.extract(ToyEngine(), targets, "loreft", layers=1)


def test_an_edit_that_reaches_no_completion_is_an_error(tiny_llama_engine, targets):
    nowhere = sl.where.generated(after=50)
    with (
        pytest.warns(UserWarning, match="does not carry over"),
        pytest.raises(VectorValueError, match="changes nothing"),
    ):
        sl.extract(tiny_llama_engine, targets, "loreft", layers=1, where=nowhere, **QUICK)
    with (
        pytest.warns(UserWarning, match="does not carry over"),
        pytest.raises(VectorValueError, match="active in none"),
    ):
        sl.extract(tiny_llama_engine, targets, "reft_r1", layers=1, where=nowhere, **QUICK)


def test_a_loss_that_is_not_finite_is_an_error(tiny_llama_engine, targets):
    with pytest.raises(VectorValueError, match=r"the loss of step 1 is (nan|inf)"):
        sl.extract(tiny_llama_engine, targets, "reft_r1", layers=1, sparsity=1e300, **QUICK)


def test_reps_takes_out_what_clamp_takes_out(tiny_llama_engine, targets):
    """The second edit of its loss is `clamp(v, hi=0)`."""
    method = Reps(setting(tiny_llama_engine, targets), RepsSettings())
    vector = sl.SteeringVector.from_tensor(method.vector.detach(), layer=1)
    seen = {}
    scores = method._setting.scores
    original = scores.changed_log_probs

    def spy(rows, change):
        found = original(rows, change)
        seen[len(seen)] = found.detach()
        return found

    scores.changed_log_probs = spy
    method.held_out_loss([0, 1])
    plan = sl.Plan(sl.clamp(vector, hi=0.0))
    listed = [item.targets for item in targets][:2]
    expected = tiny_llama_engine.score(targets.prompts[:2], listed, plan=plan)
    np.testing.assert_allclose(seen[1].numpy(), [score.log_prob for score in expected], atol=1e-4)
