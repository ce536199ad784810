"""One engine on a tiny Llama against the TransformerLens engine, whose steering is the reference."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.engines.vllm import RepControl
from tests.engines.contract import EngineContract

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = sl.SamplingPolicy.greedy()
LONG = "The ferry leaves the harbour at seven and comes back before noon. Nobody knew why the old clock had stopped. "
PROMPTS = [
    "Where did you put the keys?",
    LONG * 2,
    "She opened the window, because the room was warm",
    "I really liked the soup; the bread was stale",
    "Two plus two equals four",
    LONG,
    "The street was quiet this morning",
    "What a wonderful, happy day",
]


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    """Prefills are cut into chunks of at most 64 tokens, and one pass reads at most 48."""
    with start(
        tiny_path, layers=[0, 1, 2], max_directions=3, max_runs=4, capture_tokens=48, max_num_batched_tokens=64
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def plans(vector):
    """A plan for each of the prompts: every operator, several edits a layer, several kinds of position."""
    w = sl.where
    return [
        None,
        sl.Plan(sl.add(vector(1), coef=2.0)),
        sl.Plan(sl.add(vector(1), coef=1.5, where=w.all()), sl.ablate(vector(2), where=w.all())),
        sl.Plan(sl.clamp(vector(2), -0.5, 0.5, where=w.all()), sl.ablate(vector(2, 1)), sl.add(vector(2, 2), coef=3.0)),
        sl.Plan(sl.add(vector(1, site="resid_pre"), coef=2.0), sl.add(vector(0), coef=-1.0, where=w.index(0, -2))),
        sl.Plan(sl.add(vector(0), coef=2.0, where=w.prompt() & ~w.index(0))).scaled(0.5),
        sl.Plan(sl.add(vector(2), coef=4.0, where=w.generated(after=2, until=9))),
        sl.Plan(sl.clamp(vector(1), lo=1.0, where=w.last_prompt() | w.generated(after=3))),
    ]


def assert_same_rows(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason, a.prompt_index) == (b.text, b.finish_reason, b.prompt_index)
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=1e-3)
        assert a.token_log_qs == pytest.approx(b.token_log_qs, abs=1e-3)


def assert_same_receipts(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt_index, a.row_index, a.plan_hash) == (b.prompt_index, b.row_index, b.plan_hash)
        for x, y in zip(a.edits, b.edits, strict=True):
            assert (x.hook_point, x.layer, x.operator, x.vector, x.edited, x.expected) == (
                y.hook_point,
                y.layer,
                y.operator,
                y.vector,
                y.edited,
                y.expected,
            )
            assert x.mean_relative_change == pytest.approx(y.mean_relative_change, rel=1e-3, nan_ok=True)


# --- generation ---------------------------------------------------------------------------------------------------


def test_a_mixed_batch_continues_as_the_reference_does(engine, lens, plans):
    ours = engine.generate(PROMPTS, plan=plans, policy=GREEDY, max_new_tokens=24)
    theirs = lens.generate(PROMPTS, plan=plans, policy=GREEDY, max_new_tokens=24)
    assert_same_rows(ours, theirs)
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert_same_receipts(engine.receipts, lens.receipts)
    unsteered = lens.generate(PROMPTS, policy=GREEDY, max_new_tokens=24)
    changed = [a.token_ids != b.token_ids for a, b in zip(theirs, unsteered, strict=True)]
    assert sum(changed) >= 5  # otherwise the comparison shows little


def test_a_plan_of_scale_zero_is_the_unsteered_model(engine, plans):
    steered = [None if plan is None else plan.scaled(0.0) for plan in plans]
    engine.llm.reset_prefix_cache()
    ours = engine.generate(PROMPTS, plan=steered, policy=GREEDY, max_new_tokens=12)
    engine.llm.reset_prefix_cache()
    plain = engine.generate(PROMPTS, policy=GREEDY, max_new_tokens=12)
    assert [c.token_ids for c in ours] == [c.token_ids for c in plain]
    assert [c.token_log_probs for c in ours] == [c.token_log_probs for c in plain]


def test_the_engine_and_its_receipts_have_faces(engine, plans):
    made = engine.generate(PROMPTS, plan=plans, max_new_tokens=8)
    assert repr(engine).startswith("VLLMEngine(")
    assert repr(made.receipts) == repr(engine.receipts)
    assert "edited tokens" in engine._repr_html_()


def test_draws_belong_to_seed_prompt_and_sample(engine):
    both = engine.generate(PROMPTS[:2], n=2, max_new_tokens=8, seed=[3, 4])
    (third, fourth) = engine.generate(PROMPTS[1], n=2, max_new_tokens=8, seed=[4])
    assert [c.token_ids for c in both[2:]] == [third.token_ids, fourth.token_ids]
    assert third.token_ids != fourth.token_ids
    assert [(c.prompt_index, c.sample_index) for c in both] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_plain_sampling_draws_from_the_model_itself(engine):
    plain = engine.generate(PROMPTS[0], max_new_tokens=4)[0]
    assert plain.token_log_qs == plain.token_log_probs
    fast = engine.generate(PROMPTS[0], max_new_tokens=4, log_probs=False)[0]
    assert all(math.isnan(value) for value in fast.token_log_probs)


def test_repetition_penalty_as_in_the_reference(engine, lens):
    policy = sl.SamplingPolicy(temperature=0.0, repetition_penalty=1.4)
    ours = engine.generate(PROMPTS[:4], policy=policy, max_new_tokens=16)
    assert_same_rows(ours, lens.generate(PROMPTS[:4], policy=policy, max_new_tokens=16))


def test_stop_strings_and_ends_as_in_the_reference(engine, lens):
    plain = lens.generate(PROMPTS[:4], policy=GREEDY, max_new_tokens=16)
    stops = re.findall("[a-z]{2}", plain[0].text + plain[1].text)[:2]  # whole characters: vLLM holds back parts of one
    ours = engine.generate(PROMPTS[:4], policy=GREEDY, max_new_tokens=16, stop=stops)
    theirs = lens.generate(PROMPTS[:4], policy=GREEDY, max_new_tokens=16, stop=stops)
    assert_same_rows(ours, theirs)
    assert "stop" in {completion.finish_reason for completion in ours}


def test_an_end_token_ends_a_row(engine, lens):
    policy = sl.SamplingPolicy(temperature=1.0)
    rows = engine.generate(PROMPTS, policy=policy, n=4, max_new_tokens=64, seed=1)
    ended = [completion for completion in rows if completion.finish_reason == "eos"]
    assert ended
    assert all(c.token_ids[-1] == lens.tokenizer.eos_token_id for c in ended)


def test_chat_text_and_ids_all_steer(engine, lens, plans):
    chat = [{"role": "user", "content": "Where are the keys?"}]
    prompts = [chat, "Where are the keys?", [5, 6, 7, 8]]
    ours = engine.generate(prompts, plan=plans[1], policy=GREEDY, max_new_tokens=8)
    assert_same_rows(ours, lens.generate(prompts, plan=plans[1], policy=GREEDY, max_new_tokens=8))
    ours = engine.generate("Where are the keys?", plan=plans[1], policy=GREEDY, max_new_tokens=8, chat=True)
    assert ours[0].token_ids == engine.generate([chat], plan=plans[1], policy=GREEDY, max_new_tokens=8)[0].token_ids


# --- what is refused ----------------------------------------------------------------------------------------------


def refused(vector):
    """Prompts and plans that cannot run, with the words that say why."""
    w = sl.where
    good = "Where are the keys?"
    return [
        ([1, 2, 384], None, "token id 384"),
        ([-1, 2], None, "token id -1"),
        (LONG * 20, None, "more than the context of 512"),
        ([], None, "empty"),
        (3.5, None, "neither a string"),
        (good, sl.Plan(sl.add(vector(3), coef=1.0)), r"layers=\[0, 1, 2, 3\]"),
        (good, sl.Plan(sl.add(vector(9), coef=1.0)), "Layer 9 does not exist"),
        (good, sl.Plan(sl.add(vector(1, site="resid_mid"), coef=1.0)), r"resid_mid is not wired: .* with sites="),
        (good, sl.Plan(*(sl.add(vector(1, s), coef=1.0) for s in range(4))), "max_directions=4"),
        (good, sl.Plan(sl.add(vector(0, site="resid_pre"), coef=1.0)), "resid_pre cannot be reached"),
        (good, sl.Plan(sl.add(vector(1), coef=1.0, where=w.ids(*range(40)))), "still to be generated"),
        (LONG, sl.Plan(sl.add(vector(1), coef=1.0, where=w.index(0, 2, 4, 6, 8))), "max_runs=5"),
        (good, sl.Plan(sl.add(sl.SteeringVector.from_tensor(torch.ones(5), layer=1), coef=1.0)), r"\[5\]"),
        (good, sl.Plan(sl.add(vector(1), coef=1.0, where=w.span("nowhere"))), "nowhere"),
    ]


def test_a_bad_request_raises_by_default(engine, vector):
    for prompt, plan, words in refused(vector):
        with pytest.raises(sl.SteerlabError, match=words):
            engine.generate([prompt, "Two plus two"], plan=[plan, None], max_new_tokens=4)


def test_a_bad_request_fails_alone(engine, vector, plans):
    bad = refused(vector)
    prompts = [*[prompt for prompt, _, _ in bad], *PROMPTS]
    ours = engine.generate(
        prompts, plan=[*[p for _, p, _ in bad], *plans], policy=GREEDY, max_new_tokens=8, on_error="return"
    )
    assert [c.finish_reason for c in ours[: len(bad)]] == ["error"] * len(bad)
    assert sorted(engine.errors) == list(range(len(bad)))
    good = engine.generate(PROMPTS, plan=plans, policy=GREEDY, max_new_tokens=8)
    assert [c.token_ids for c in ours[len(bad) :]] == [c.token_ids for c in good]
    assert engine.errors == {}
    assert [r.row_index for r in engine.receipts] == list(range(len(PROMPTS)))


@pytest.mark.usefixtures("unchecked_types")
def test_both_engines_refuse_the_same_in_the_same_words(engine, lens, vector):
    """What is no plan was taken for no plan at all once the engine had run without one, and left the model as it is."""
    engine.generate("Hi", max_new_tokens=1)
    calls = {
        "an edit": lambda e: e.generate("Hi", plan=sl.add(vector(1), coef=1.0), max_new_tokens=1),
        "text": lambda e: e.score("Hi", [" a"], plan="plan"),
        "one of two": lambda e: e.generate(["Hi", "Hi"], plan=[None, "plan"], max_new_tokens=1),
        "a policy by name": lambda e: e.generate("Hi", policy="greedy", max_new_tokens=1),
        "no policy": lambda e: e.generate("Hi", policy=None, max_new_tokens=1),
        "no measure": lambda e: e.measure("Hi", [" a"], {}),
        "a list of measures": lambda e: e.measure("Hi", [" a"], [max]),
        "no function": lambda e: e.measure("Hi", [" a"], {"a": 5}),
    }
    for name, call in calls.items():
        with pytest.raises(sl.SteerlabError) as theirs:
            call(lens)
        with pytest.raises(type(theirs.value)) as ours:
            call(engine)
        assert str(ours.value) == str(theirs.value), name
    (row,) = engine.generate(["Hi"], plan=[None], policy=GREEDY, max_new_tokens=2)
    assert row.token_ids == lens.generate(["Hi"], policy=GREEDY, max_new_tokens=2)[0].token_ids


def test_policies_that_vllm_does_not_sample_from_are_refused(engine):
    with pytest.raises(sl.PolicyError, match="min_p before"):
        engine.generate(PROMPTS[0], policy=sl.SamplingPolicy(min_p=0.1, top_k=5))
    with pytest.raises(sl.PolicyError, match=r"0\.01"):
        engine.generate(PROMPTS[0], policy=sl.SamplingPolicy(temperature=0.001))
    with pytest.raises(sl.PlanError, match="2 plans for 1 prompts"):
        engine.generate(PROMPTS[:1], plan=[None, None])


# --- scores -------------------------------------------------------------------------------------------------------

TARGETS = [
    [" on the table", " here"],
    [" And"],
    [", and"],
    [" cold", [7, 8, 9]],
    ["!"],
    ["It"],
    [" ends here as well"],
    [" this is a day"],
]


@pytest.mark.parametrize("steered", [False, True])
def test_scores_equal_the_reference(engine, lens, plans, steered):
    plan = plans if steered else None
    engine.llm.reset_prefix_cache()
    ours = engine.score(PROMPTS, TARGETS, plan=plan, score_eos=True)
    mine = list(engine.receipts)
    own = [not any(row.positions) for row in engine.inherited]  # a mean is over the positions that a row ran itself
    theirs = lens.score(PROMPTS, TARGETS, plan=plan, score_eos=True)
    assert ours.token_ids == theirs.token_ids
    assert ours.boundary == theirs.boundary
    for a, b in zip(ours.token_log_probs, theirs.token_log_probs, strict=True):
        assert a == pytest.approx(b, abs=1e-3)
    assert [r.edited for r in mine] == [r.edited for r in lens.receipts]
    assert own.count(True) > len(own) / 2
    assert_same_receipts(itertools.compress(mine, own), itertools.compress(lens.receipts, own))


def test_scores_do_not_change_with_a_warm_cache(engine, plans):
    engine.llm.reset_prefix_cache()
    cold = engine.score(PROMPTS[:6], TARGETS[:6], plan=plans[:6])
    engine.generate(PROMPTS[:6], plan=plans[:6], policy=GREEDY, max_new_tokens=8)
    warm = engine.score(PROMPTS[:6], TARGETS[:6], plan=plans[:6])
    assert warm.log_prob == pytest.approx(cold.log_prob, abs=1e-4)


def test_a_target_beyond_the_context_is_an_error(engine):
    with pytest.raises(sl.ContextLengthError, match="more than the context of 512"):
        engine.score([[5] * 500], [[[6] * 20]])


# --- activations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [None, "mean", "last"])
def test_activations_equal_the_reference(engine, lens, plans, pool):
    engine.generate(PROMPTS, plan=plans[2], max_new_tokens=1)  # what is cached must be read all the same
    options = {"layers": [0, 2], "plan": plans[2], "pool": pool, "where": ~sl.where.index(1)}
    ours, theirs = engine.capture(PROMPTS, **options), lens.capture(PROMPTS, **options)
    assert ours.positions == theirs.positions
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    for layer in (0, 2):
        torch.testing.assert_close(ours[layer], theirs[layer], atol=2e-3, rtol=1e-4)


def test_activations_that_cannot_be_read(engine):
    with pytest.raises(sl.PlanError, match=r"layers=\[0, 1, 2, 3\]"):
        engine.capture(PROMPTS[:1], layers=3)
    with pytest.raises(sl.InputError, match="selects no token in prompt 0"):
        engine.capture(PROMPTS[:1], layers=1, where=sl.where.generated())


def test_both_engines_name_the_same_model(engine, lens):
    assert engine.info == lens.info
    assert isinstance(engine, sl.Engine)


def test_vectors_are_extracted_alike(engine, lens):
    pairs = sl.ContrastPairs.from_lists([f"{p} good" for p in PROMPTS], [f"{p} bad" for p in PROMPTS])
    ours, theirs = (sl.extract(e, pairs, layers=[1, 2])[1].values for e in (engine, lens))
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


# --- RepControl ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_pos", "where"),
    [
        (None, sl.where.all()),
        ("start", sl.where.index(0)),
        ("end", sl.where.index(-1)),
        (3, sl.where.index(3)),
        (-2, sl.where.index(-2)),
    ],
)
def test_repcontrol_is_a_plan(engine, vector, token_pos, where):
    ours = RepControl(engine)(
        PROMPTS[:3], {-3: vector(1).values, 2: vector(2)}, 1.5, token_pos, temperature=0, max_new_tokens=8
    )
    plan = sl.Plan(sl.add(vector(1), coef=1.5, where=where), sl.add(vector(2), coef=1.5, where=where))
    plain = engine.generate(PROMPTS[:3], plan=plan, policy=GREEDY, max_new_tokens=8)
    assert [c.token_ids for c in ours] == [c.token_ids for c in plain]


def test_repcontrol_without_activations_leaves_the_model_alone(engine):
    ours = RepControl(engine)(PROMPTS[:2], temperature=0, max_new_tokens=8)
    plain = engine.generate(PROMPTS[:2], policy=GREEDY, max_new_tokens=8)
    assert [c.token_ids for c in ours] == [c.token_ids for c in plain]
    with pytest.raises(sl.InputError, match="token_pos"):
        RepControl(engine)(PROMPTS[:2], {1: torch.ones(128)}, token_pos="middle")


@pytest.mark.parametrize("shape", [(1, 128), (1, 1, 128)])
def test_vectors_as_repe_keeps_them_and_vllms_name_of_the_length(engine, vector, shape):
    ours = RepControl(engine)(PROMPTS[:2], {1: vector(1).values}, 3.0, temperature=0, max_new_tokens=8)
    values = vector(1).values.reshape(shape).numpy()
    same = RepControl(engine)(PROMPTS[:2], {np.int64(1): values}, np.float32(3.0), temperature=0, max_tokens=8)
    assert [c.token_ids for c in same] == [c.token_ids for c in ours]
    with pytest.raises(sl.InputError, match="two names of one number"):
        RepControl(engine)(PROMPTS[:2], max_tokens=8, max_new_tokens=8)


def test_hooks_are_refused_by_name(engine, plans):
    with pytest.raises(sl.PlanError, match="VLLMEngine has no such model"):
        plans[1].hooks(engine)


# --- numbers and lists of other libraries -----------------------------------------------------------------------------


def test_arrays_and_tensors_are_lists(engine, vector):
    ids, targets = [[5, 6, 7], [8, 9, 10]], [[[11, 12]], [[13]]]
    plan = sl.Plan(sl.add(vector(1), coef=2.0))
    plain = engine.generate(ids, plan=plan, max_new_tokens=4, n=2, seed=[3, 4])
    given = [np.array(ids), torch.tensor(ids), [np.array(ids[0]), torch.tensor(ids[1])], (row for row in ids)]
    for prompts in given:
        same = engine.generate(
            prompts, plan=plan, max_new_tokens=torch.tensor(4), n=np.int64(2), seed=np.array([3, 4], dtype=np.uint32)
        )
        assert [c.token_ids for c in same] == [c.token_ids for c in plain]
    scores = engine.score(ids, targets)
    for prompts, wanted in (
        (np.array(ids), [np.array([[11, 12]]), torch.tensor([[13]])]),
        ((i for i in ids), iter(targets)),
    ):
        assert np.array_equal(engine.score(prompts, wanted).log_prob, scores.log_prob)
    read = engine.capture(np.array(ids), layers=np.array([1, 2]))
    assert torch.equal(read[1], engine.capture(ids, layers=[1, 2])[1])


# --- last: it ends the engine -------------------------------------------------------------------------------------


class TestContract(EngineContract):
    """What every engine does in the same way."""


def test_a_closed_engine_says_so(engine):
    engine.close()
    engine.close()
    with pytest.raises(sl.InputError, match="closed"):
        engine.generate(PROMPTS[0])
