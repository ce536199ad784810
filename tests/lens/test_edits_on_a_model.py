"""Every kind of edit on a model: what really changes in the stream, and the invariants that each must keep."""

import math

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError, PlanError
from steerlab.steering.operators import Edit, Gate, Operator, Term
from tests.lens.helpers import PROMPTS, random_vector

GREEDY = sl.SamplingPolicy.greedy()
PROMPT = "The capital of France is large"
LAYER = 1
KINDS = [
    "set",
    "affine",
    "rotate",
    "norm kept",
    "decay",
    "window",
    "condition",
    "condition on a later layer",
    "ids",
    "span",
    "mask",
]


def plan_of(engine, kind, **options):
    v, w = random_vector(engine, layer=LAYER), random_vector(engine, layer=LAYER, seed=1)
    early, late = random_vector(engine, layer=0, seed=2), random_vector(engine, layer=3, seed=2)
    space = engine.tokenizer(" ", add_special_tokens=False)["input_ids"][0]
    edit = {
        "set": lambda: sl.set(v, 4.0, **options),
        "affine": lambda: sl.set(v, 4.0, reference=w, **options),
        "rotate": lambda: sl.rotate(v, w, angle=1.0, **options),
        "norm kept": lambda: sl.add(v, coef=2.0, norm="keep", **options),
        "decay": lambda: sl.add(v, coef=3.0, schedule=sl.schedule.decay(2.0), **options),
        "window": lambda: sl.add(v, coef=3.0, schedule=sl.schedule.window(1, 4), **options),
        "condition": lambda: sl.add(v, coef=3.0, when=sl.when(early, above=0.0), **options),
        "condition on a later layer": lambda: sl.add(
            v, coef=3.0, when=sl.when(late, above=0.0), **({"where": sl.where.generated()} | options)
        ),
        "ids": lambda: sl.add(v, coef=3.0, where=sl.where.ids(space, 5, 6, 7, 8) | sl.where.generated()),
        "span": lambda: sl.add(v, coef=3.0, where=sl.where.span("he", missing="skip") | sl.where.generated()),
        "mask": lambda: sl.add(v, coef=3.0, where=sl.where.mask([True, True, False, True]) | sl.where.generated()),
    }[kind]()
    return sl.Plan(edit)


def stream(engine, prompt, plan=None):
    return engine.capture([prompt], layers=LAYER, plan=plan)[LAYER]


@pytest.mark.parametrize("kind", ["set", "affine", "rotate", "norm kept"])
def test_the_stream_is_what_the_formula_says(tiny_engine, kind):
    _, engine = tiny_engine
    before = stream(engine, PROMPT)
    after = stream(engine, PROMPT, plan_of(engine, kind, where=sl.where.all()))
    v, w = random_vector(engine, layer=LAYER), random_vector(engine, layer=LAYER, seed=1)
    u = v.unit
    if kind in ("set", "affine"):
        target = 4.0 if kind == "set" else 4.0 + float(w.values @ u)
        torch.testing.assert_close(after @ u, torch.full((len(after),), target), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(after - (after @ u)[:, None] * u, before - (before @ u)[:, None] * u)
    if kind == "rotate":
        axis = w.values - (w.values @ u) * u
        axis = axis / axis.norm()
        turned = torch.stack([after @ u, after @ axis], dim=1)
        angle = torch.tensor([[math.cos(1), math.sin(1)], [-math.sin(1), math.cos(1)]])
        torch.testing.assert_close(
            turned, torch.stack([before @ u, before @ axis], dim=1) @ angle, atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1))
    if kind == "norm kept":
        torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1))
        added = before + 2 * v.values
        torch.testing.assert_close(torch.cosine_similarity(after, added, dim=-1), torch.ones(len(after)))


@pytest.mark.parametrize("kind", KINDS)
def test_scale_zero_is_the_unsteered_model_to_the_bit(tiny_engine, kind):
    _, engine = tiny_engine
    options = {"policy": GREEDY, "max_new_tokens": 5}
    plain = engine.generate([PROMPT], **options)[0]
    zero = engine.generate([PROMPT], plan=plan_of(engine, kind).scaled(0.0), **options)[0]
    assert zero.token_ids == plain.token_ids
    assert zero.token_log_probs == plain.token_log_probs


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_many_lengths_equals_one_by_one(tiny_engine, kind):
    _, engine = tiny_engine
    plan, options = plan_of(engine, kind), {"policy": GREEDY, "max_new_tokens": 6}
    together = engine.generate(PROMPTS, plan=plan, **options)
    receipts = engine.receipts
    for index, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], plan=plan, **options)[0]
        assert alone.token_ids == together[index].token_ids
        assert alone.token_log_probs == pytest.approx(together[index].token_log_probs, abs=5e-5)
        assert engine.receipts[0].edited == receipts[index].edited


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_what_was_generated_gives_the_log_probs_of_generation(tiny_engine, kind):
    _, engine = tiny_engine
    plan = plan_of(engine, kind)
    plain = engine.generate(PROMPTS[:4], policy=GREEDY, max_new_tokens=8)
    steered = engine.generate(PROMPTS[:4], plan=plan, policy=GREEDY, max_new_tokens=8)
    edited = [receipt.edited for receipt in engine.receipts]
    assert any(a.token_log_probs != b.token_log_probs for a, b in zip(plain, steered, strict=True))
    targets = [[list(row.token_ids)] for row in steered]
    for row, score in zip(steered, engine.score(PROMPTS[:4], targets, plan=plan), strict=True):
        assert score.token_log_probs == pytest.approx(row.token_log_probs, abs=1e-4)
    assert [receipt.edited for receipt in engine.receipts] == edited


def test_a_condition_lets_some_rows_through_and_leaves_the_others_bit_equal(tiny_llama_engine):
    engine = tiny_llama_engine
    probe = random_vector(engine, layer=0, seed=2)
    readings = [float(engine.capture([p], layers=0)[0][-1] @ probe.unit) for p in PROMPTS]
    middle = sum(sorted(readings)[3:5]) / 2
    plan = sl.Plan(sl.add(random_vector(engine, layer=LAYER), coef=3.0, when=sl.when(probe, above=middle)))
    plain = engine.score(PROMPTS, [[" and so"]] * len(PROMPTS))
    steered = engine.score(PROMPTS, [[" and so"]] * len(PROMPTS), plan=plan)
    passed = [receipt.edits[0].condition_passed for receipt in engine.receipts]
    assert passed == [reading > middle for reading in readings]
    assert 0 < sum(passed) < len(PROMPTS)
    for fired, before, after in zip(passed, plain, steered, strict=True):
        assert (before.log_prob != after.log_prob) is fired


def test_a_prompt_longer_than_a_block_is_an_error_where_the_answer_would_come_late(tiny_llama_engine):
    engine = tiny_llama_engine
    plan = plan_of(engine, "condition", where=sl.where.all())
    prompt = "word " * 20
    engine.score([prompt], [[" end"]], plan=plan)
    before, engine.batch_tokens = engine.batch_tokens, 16
    try:
        with pytest.raises(PlanError, match="batch_tokens"):
            engine.score([prompt], [[" end"]], plan=plan)
    finally:
        engine.batch_tokens = before


def test_a_span_may_not_reach_into_a_token_that_merges_with_the_target(tiny_llama_engine, lens_engine):
    plan = sl.Plan(sl.add(random_vector(lens_engine, layer=3), coef=1.0, where=sl.where.span("Ans")))
    with pytest.raises(PlanError, match="boundary='separate'"):
        lens_engine.score(["The Ans"], [["wer"]], plan=plan)
    lens_engine.score(["The Ans"], [["wer"]], plan=plan, boundary="separate")
    assert lens_engine.receipts[0].edited == 1


def test_equal_prompts_with_different_masks_do_not_share_a_pass(tiny_llama_engine):
    engine = tiny_llama_engine
    v = random_vector(engine, layer=LAYER)
    masks = torch.tensor([[True, False, False], [False, False, True]])
    both = engine.score([PROMPT] * 2, [[" x"]] * 2, plan=sl.Plan(sl.add(v, coef=5.0, where=sl.where.mask(masks))))
    for row in range(2):
        plan = sl.Plan(sl.add(v, coef=5.0, where=sl.where.mask(masks[row])))
        assert engine.score([PROMPT], [[" x"]], plan=plan)[0].log_prob == pytest.approx(both[row].log_prob, abs=1e-5)
    assert both[0].log_prob != both[1].log_prob


def test_captures_read_span_ids_and_mask_positions(tiny_llama_engine):
    engine = tiny_llama_engine
    all_of_it = engine.capture([PROMPT], layers=LAYER)
    ids = all_of_it.prompt_token_ids[0]
    found = engine.capture([PROMPT, "France"], layers=LAYER, where=sl.where.span("France"))
    places = list(found.positions[0])
    assert "".join(engine.tokenizer.decode([ids[p]]) for p in places).strip() == "France"
    torch.testing.assert_close(found.of(0, LAYER), all_of_it[LAYER][places])
    by_id = engine.capture([PROMPT], layers=LAYER, where=sl.where.ids(ids[2]))
    assert list(by_id.positions[0]) == [p for p, token in enumerate(ids) if token == ids[2]]
    masked = engine.capture([PROMPT], layers=LAYER, where=sl.where.mask([False, True]), max_new_tokens=3)
    assert masked.positions[0] == (1,)


class Feature(Operator):
    """Sets what is read along a direction, where it is above a threshold; a second one is never reached."""

    unit = "coef"

    def terms(self, along):
        gates = (Gate(3.0, slope=-1.0, threshold=threshold) for threshold in (0.1, 1e3))
        return tuple(Term(along.unit, gate, along.unit, bias=0.05) for gate in gates)

    def to_json(self):
        return {"kind": "feature"}


def test_a_program_runs_every_operator_option_and_set_of_positions_as_the_fast_engine_does(tiny_llama_engine):
    engine = tiny_llama_engine
    kinds = ["affine", "ids", "span", "rotate", "norm kept", "decay", "window", "condition"]
    feature = Edit(Feature(), random_vector(engine, layer=2), sl.where.all())
    plan = sl.Plan(*(edit for kind in kinds for edit in plan_of(engine, kind)), feature)
    options = {"policy": GREEDY, "max_new_tokens": 7, "plan": plan}
    fast = engine.generate(PROMPTS[:3], engine="fast", **options)
    edited = [[edit.edited for edit in receipt.edits] for receipt in engine.receipts]
    ours = engine.generate(PROMPTS[:3], engine="graph", **options)
    assert [row.token_ids for row in ours] == [row.token_ids for row in fast]
    assert [[edit.edited for edit in receipt.edits] for receipt in engine.receipts] == edited
    changed = [[edit.mean_relative_change for edit in receipt.edits] for receipt in ours.receipts]
    for found, theirs in zip(changed, fast.receipts, strict=True):
        assert found == pytest.approx([edit.mean_relative_change for edit in theirs.edits], rel=1e-3, nan_ok=True)


class Shrink(Operator):
    """Δ = (tanh(u·h) − u·h) u, which is no sum of gated terms."""

    unit = "coef"

    def delta(self, h, along):
        projection = h @ along.unit
        return (projection.tanh() - projection)[..., None] * along.unit

    def to_json(self):
        return {"kind": "shrink"}


def test_a_program_refuses_an_operator_without_terms(tiny_llama_engine):
    plan = sl.Plan(Edit(Shrink(), random_vector(tiny_llama_engine, layer=LAYER), sl.where.default()))
    with pytest.raises(InputError, match=r"share one form, and .*Shrink.* states no terms"):
        tiny_llama_engine.generate([PROMPT], plan=plan, max_new_tokens=2, engine="graph")


def test_hooks_for_whole_prompts_refuse_what_needs_text(tiny_llama_engine):
    engine = tiny_llama_engine
    ids = torch.tensor([engine.tokenizer(PROMPT)["input_ids"]])
    hooks = plan_of(engine, "span").hooks(engine)
    with pytest.raises(PlanError, match="needs the prompt's text"), engine.model.hooks(fwd_hooks=hooks):
        engine.model(ids)


def test_perplexity_refuses_positions_that_windows_cannot_follow(tiny_llama_engine):
    text = "some words that go on and on for a while " * 3
    for kind in ("decay", "condition", "ids"):
        plan = plan_of(tiny_llama_engine, kind)
        assert sl.perplexity(tiny_llama_engine, text, plan=plan).perplexity > 0
        with pytest.raises(PlanError, match="windows"):
            sl.perplexity(tiny_llama_engine, text, context_length=32, stride=16, plan=plan)


@pytest.fixture(scope="module")
def half(tiny_llama_path):
    with sl.load(tiny_llama_path, dtype="bfloat16", device="cpu") as engine:
        yield engine


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_stream_stays_bfloat16_and_follows_the_float32_one(half, tiny_llama_engine, kind):
    plan = plan_of(half, kind, **({} if kind in ("ids", "span", "mask") else {"where": sl.where.generated()}))
    seen = set()
    spy = ("blocks.2.hook_resid_post", lambda value, hook: seen.add(value.dtype))
    with half.model.hooks(fwd_hooks=[spy]):
        rough = half.score([PROMPT], [[" and old"]], plan=plan)[0]
    exact = tiny_llama_engine.score([PROMPT], [[" and old"]], plan=plan)[0]
    assert seen == {torch.bfloat16}
    assert rough.log_prob == pytest.approx(exact.log_prob, rel=0.02)
