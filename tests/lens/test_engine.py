import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab._runtime import teacher_forcing
from steerlab.core.engine import Engine
from steerlab.core.errors import ContextLengthError, HookPointError, InputError, PlanError, VectorShapeError
from steerlab.measures import chosen_log_probs, entropy
from tests.lens.helpers import PROMPTS, all_hooks, random_vector, strong_plan
from tests.tiny_models import build_tiny_gpt2

GREEDY = sl.SamplingPolicy.greedy()


def greedy(engine, prompts, **options):
    return engine.generate(prompts, policy=GREEDY, **({"max_new_tokens": 6} | options))


# --- the model untouched ------------------------------------------------------------------------------------------


def test_it_is_an_engine(tiny_llama_engine):
    assert isinstance(tiny_llama_engine, Engine)
    info = tiny_llama_engine.info
    assert (info.n_layers, info.d_model, info.d_vocab, info.context_length, info.dtype) == (4, 64, 384, 256, "float32")
    assert info.weight_processing == "none"


def test_logits_without_a_plan_are_the_plain_models(any_engine, references):
    name, engine = any_engine
    ids = engine.tokenizer(PROMPTS[5])["input_ids"]
    with torch.no_grad():
        expected = references(name)(torch.tensor([ids])).logits[0]
    found = engine.logits(PROMPTS[5])
    if name == "tiny_gpt2_engine":  # its fused matrices are multiplied in another order
        assert (found - expected).abs().max() / expected.abs().max() < 1e-6
    else:
        assert torch.equal(found, expected)


def test_a_gpt2_of_usual_scale_is_within_a_millionth(tmp_path):
    path = build_tiny_gpt2(tmp_path, initializer_range=0.02)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with sl.load(path, device="cpu") as engine:
        ids = engine.tokenizer(PROMPTS[3])["input_ids"]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(engine.logits(ids), expected, atol=1e-6, rtol=0)


def test_dose_zero_equals_no_plan_to_the_bit(tiny_engine):
    _, engine = tiny_engine
    v, u = random_vector(engine), random_vector(engine, layer=1, seed=1)
    plan = sl.Plan(sl.add(v, dose=0.3), sl.ablate(u, where=sl.where.all()), sl.clamp(v, hi=-5.0)).scaled(0)
    zero_dose = sl.Plan(sl.add(v, dose=0.0, where=sl.where.all()))
    plain = engine.logits(PROMPTS[1])
    assert torch.equal(engine.logits(PROMPTS[1], plan=plan), plain)
    assert torch.equal(engine.logits(PROMPTS[1], plan=zero_dose), plain)
    assert torch.equal(engine.logits(PROMPTS[1], plan=sl.Plan()), plain)
    assert not torch.equal(engine.logits(PROMPTS[1], plan=strong_plan(engine)), plain)
    ours, theirs = (greedy(engine, PROMPTS[:2], plan=p, max_new_tokens=3) for p in (plan, None))
    assert [c.token_log_probs for c in ours] == [c.token_log_probs for c in theirs]
    ours, theirs = (engine.score(PROMPTS[:2], [[" a b"], [" c"]], plan=p) for p in (plan, None))
    assert ours.token_log_probs == theirs.token_log_probs


# --- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steered", [False, True])
def test_a_scored_batch_equals_one_by_one_in_any_order(tiny_engine, steered):
    _, engine = tiny_engine
    plan = strong_plan(engine) if steered else None
    targets = [[" one", " two or three", " and"]] * len(PROMPTS)
    together = engine.score(PROMPTS, targets, plan=plan)
    backwards = engine.score(PROMPTS[::-1], targets, plan=plan)
    for i, prompt in enumerate(PROMPTS):
        alone = engine.score(prompt, targets[i], plan=plan)
        assert np.allclose([s.log_prob for s in together.of(i)], alone.log_prob, atol=1e-4)
        assert np.allclose([s.log_prob for s in backwards.of(len(PROMPTS) - 1 - i)], alone.log_prob, atol=1e-4)


@pytest.mark.parametrize("budget", [1, 40])
def test_the_batch_budget_changes_nothing(tiny_engine, budget, monkeypatch):
    _, engine = tiny_engine
    plan = strong_plan(engine, where=sl.where.all())
    few = PROMPTS[:4]

    def run():
        scores = engine.score(few, [[" one", " two or three"]] * 4, plan=plan).log_prob
        return scores, greedy(engine, few, plan=plan).texts, engine.capture(few, layers=2, plan=plan)[2]

    scores, texts, captured = run()
    monkeypatch.setattr(engine, "batch_tokens", budget)
    small_scores, small_texts, small_captured = run()
    assert np.allclose(small_scores, scores, atol=1e-4)
    assert small_texts == texts
    torch.testing.assert_close(small_captured, captured, atol=1e-4, rtol=0)


def test_pad_equal_to_eos_is_no_different(tiny_llama_engine, monkeypatch):
    expected = greedy(tiny_llama_engine, PROMPTS)
    tokenizer = tiny_llama_engine.tokenizer
    for pad in (tokenizer.eos_token, tokenizer.bos_token, None):
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "_special_tokens_map", tokenizer._special_tokens_map | {"pad_token": pad})
            assert tokenizer.pad_token == pad
            found = greedy(tiny_llama_engine, PROMPTS)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_a_list_of_plans_equals_separate_calls(tiny_engine):
    _, engine = tiny_engine
    a = strong_plan(engine)
    b = sl.Plan(sl.ablate(random_vector(engine, layer=1, seed=3), where=sl.where.all()))
    plans = [a, None, b, a, None, sl.Plan(), a.scaled(-1), b]
    generated = greedy(engine, PROMPTS, plan=plans)
    scored = engine.score(PROMPTS, [[" one two"]] * 8, plan=plans)
    score_receipts = engine.receipts
    captured = engine.capture(PROMPTS, layers=[2], plan=plans)
    assert [r.plan_hash for r in engine.receipts] == [None if p is None else p.hash for p in plans]
    assert [r.plan_hash for r in score_receipts] == [r.plan_hash for r in engine.receipts]
    for i, (prompt, plan) in enumerate(zip(PROMPTS, plans, strict=True)):
        assert generated[i].token_ids == greedy(engine, prompt, plan=plan)[0].token_ids
        assert scored[i].log_prob == pytest.approx(engine.score(prompt, [" one two"], plan=plan)[0].log_prob, abs=1e-4)
        alone = engine.capture(prompt, layers=[2], plan=plan)[2]
        torch.testing.assert_close(captured.of(i, 2), alone, atol=1e-4, rtol=0)


# --- what an edit does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"])
@pytest.mark.parametrize("layer", [0, 3])
def test_the_measured_change_is_coef_times_v_once_and_only_there(tiny_engine, site, layer):
    _, engine = tiny_engine
    v = random_vector(engine, layer=layer, site=site)
    plan = sl.Plan(sl.add(v, coef=2.5, where=sl.where.index(1) | sl.where.last_prompt()))
    plain, steered = (engine.capture(PROMPTS, layers=layer, site=site, plan=p) for p in (None, plan))
    for i, ids in enumerate(plain.prompt_token_ids):
        expected = plain.of(i, layer).clone()
        for position in {1, len(ids) - 1} & set(range(len(ids))):
            expected[position] += 2.5 * v.values
        assert torch.equal(steered.of(i, layer), expected)
    for receipt, ids in zip(engine.receipts, plain.prompt_token_ids, strict=True):
        assert receipt.edited == len({1, len(ids) - 1} & set(range(len(ids))))


def test_during_generation_the_change_is_coef_times_v_once_per_position(tiny_engine):
    _, engine = tiny_engine
    layer = engine.info.n_layers // 2
    v = random_vector(engine, layer=layer)
    plan = sl.Plan(sl.add(v, coef=3.0))
    seen = []
    with engine.model.hooks(
        fwd_hooks=[(f"blocks.{layer + 1}.hook_in", lambda value, hook: seen.append(value.clone()))]
    ):
        out = engine.generate(PROMPTS[1], plan=plan, max_new_tokens=5, seed=3)
    if out[0].finish_reason == "eos":
        pytest.fail("the row ended early; choose another seed")
    prompt = out.prompt_token_ids[0]
    plain = engine.capture([[*prompt, *out[0].token_ids[:-1]]], layers=layer)[layer]
    change = torch.cat(seen, dim=1)[0] - plain
    expected = torch.zeros_like(change)
    expected[len(prompt) - 1 :] = 3.0 * v.values
    torch.testing.assert_close(change, expected, atol=1e-4, rtol=0)


def test_edits_at_one_layer_follow_the_plans_order(tiny_llama_engine):
    v = random_vector(tiny_llama_engine)
    adding, clamping = sl.add(v, coef=5.0), sl.clamp(v, hi=0.25)
    last = {"layers": 2, "where": sl.where.last_prompt()}
    for plan, bounded in ((sl.Plan(adding, clamping), True), (sl.Plan(clamping, adding), False)):
        projection = tiny_llama_engine.capture(PROMPTS, plan=plan, **last)[2] @ v.unit
        assert (projection.max().item() <= 0.2501) == bounded


def test_aliases_stand_for_the_same_point_and_act_once(tiny_llama_engine):
    """resid_post of one layer and resid_pre of the next are the same stream, edited at two points."""
    v = random_vector(tiny_llama_engine, layer=1)
    one = sl.Plan(sl.add(v, coef=2.0, where=sl.where.all()))
    other = sl.Plan(sl.add(v.at(2, "resid_pre"), coef=2.0, where=sl.where.all()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert torch.equal(tiny_llama_engine.logits("Hi", plan=one), tiny_llama_engine.logits("Hi", plan=other))


# --- receipts -----------------------------------------------------------------------------------------------------


def test_receipts_of_generation_count_what_was_run(tiny_llama_engine):
    engine = tiny_llama_engine
    v = random_vector(engine)
    plan = sl.Plan(
        sl.add(v, coef=1.0), sl.ablate(v, where=sl.where.prompt()), sl.add(v, coef=1.0, where=sl.where.index(0))
    )
    out = engine.generate(PROMPTS, plan=plan, max_new_tokens=5, n=2, seed=1)
    assert len(engine.receipts) == 16
    for receipt, completion in zip(engine.receipts, out, strict=True):
        n = len(completion.token_ids)
        length = len(out.prompt_token_ids[completion.prompt_index])
        assert [e.edited for e in receipt.edits] == [e.expected for e in receipt.edits] == [n, length, 1]
        assert receipt.prompt_index == completion.prompt_index
        assert receipt.edits[0].mean_relative_change > 0
    assert [r.row_index for r in engine.receipts] == list(range(16))


def test_receipts_of_scores_leave_the_last_target_token_out(tiny_llama_engine):
    engine = tiny_llama_engine
    plan = sl.Plan(
        sl.add(random_vector(engine), coef=1.0), sl.add(random_vector(engine), coef=1.0, where=sl.where.all())
    )
    scores = engine.score(PROMPTS[:3], [[" a", " b c d"], [" e"], [" f g", " h"]], plan=plan)
    contexts = [len(engine.tokenizer(p)["input_ids"]) for p in PROMPTS[:3]]
    assert [(r.prompt_index, r.row_index) for r in engine.receipts] == [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)]
    for score, receipt in zip(scores, engine.receipts, strict=True):
        counts = [score.num_tokens, contexts[score.prompt_index] + score.num_tokens - 1]
        assert [e.edited for e in receipt.edits] == counts


# --- hooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["generate", "score", "capture", "logits"])
def test_an_error_half_way_removes_our_hooks_and_leaves_the_users(tiny_llama_engine, call):
    engine, bridge = tiny_llama_engine, tiny_llama_engine.model
    before = all_hooks(bridge)
    calls = []

    def users(value, hook):
        calls.append(hook.name)
        if len(calls) == 2:
            raise RuntimeError("half way")

    bridge.add_hook("blocks.3.hook_out", users)
    try:
        with_user = all_hooks(bridge)
        run = {
            "generate": lambda: greedy(engine, PROMPTS[:2], plan=strong_plan(engine)),
            "score": lambda: engine.score("Hi", [" a b", " c d"], plan=strong_plan(engine)),
            "capture": lambda: engine.capture("Hi", layers="all", plan=strong_plan(engine)),
            "logits": lambda: engine.logits("Hi", plan=strong_plan(engine)),
        }[call]
        strong_plan(engine)  # measures the median norm, if no test did before
        calls.clear()
        if call in ("capture", "logits"):
            calls.append("one pass only")
        with pytest.raises(RuntimeError, match="half way"):
            run()
        assert all_hooks(bridge) == with_user
        run()
        assert len(calls) > 2
        assert all_hooks(bridge) == with_user
    finally:
        bridge.reset_hooks()
    assert all_hooks(bridge) == before


def test_a_users_own_edit_is_seen_and_kept(tiny_llama_engine):
    bridge, layer = tiny_llama_engine.model, 2
    v = random_vector(tiny_llama_engine, layer=layer)
    plain = tiny_llama_engine.logits("Hi there")
    with bridge.hooks(fwd_hooks=[(f"blocks.{layer}.hook_out", lambda value, hook: value + 2 * v.values)]):
        theirs = tiny_llama_engine.logits("Hi there")
        both = tiny_llama_engine.logits("Hi there", plan=sl.Plan(sl.add(v, coef=-2.0, where=sl.where.all())))
    assert not torch.equal(theirs, plain)
    torch.testing.assert_close(both, plain, atol=1e-4, rtol=0)
    assert torch.equal(tiny_llama_engine.logits("Hi there"), plain)


def test_plan_hooks_serve_run_with_cache_and_hooks(tiny_engine):
    _, engine = tiny_engine
    plan = sl.Plan(
        sl.add(random_vector(engine, layer=1), dose=0.3, where=sl.where.all()),
        sl.ablate(random_vector(engine, layer=2, seed=1), where=sl.where.last_prompt()),
        sl.clamp(random_vector(engine, layer=2, site="resid_mid"), hi=0.1, where=~sl.where.index(0)),
    )
    ids = torch.tensor([engine.tokenizer(PROMPTS[3])["input_ids"]])
    expected = engine.logits(PROMPTS[3], plan=plan)
    with engine.model.hooks(fwd_hooks=plan.hooks(engine)):
        _, cache = engine.model.run_with_cache(ids)
    run = engine.model.run_with_hooks(ids, fwd_hooks=plan.hooks(engine))
    torch.testing.assert_close(run[0], expected, atol=1e-5, rtol=1e-5)
    captured = engine.capture(PROMPTS[3], layers=2, plan=plan)[2]
    torch.testing.assert_close(cache["blocks.2.hook_out"][0], captured, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(engine.model(ids)[0], engine.logits(PROMPTS[3]), atol=1e-5, rtol=1e-5)


# --- dtypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_with_a_float32_vector(tiny_llama_path, dtype):
    with sl.load(tiny_llama_path, dtype=dtype, device="cpu") as engine:
        assert engine.info.dtype == dtype
        v = random_vector(engine)
        plan = sl.Plan(sl.add(v, dose=0.5), sl.ablate(random_vector(engine, layer=1)), sl.clamp(v, hi=0.0))
        assert engine.logits("Hi there", plan=plan).dtype == getattr(torch, dtype)
        out = greedy(engine, PROMPTS[:3], plan=plan)
        assert all(c.token_log_probs for c in out)
        acts = engine.capture("Hi there", layers="all", plan=plan)
        assert all(value.dtype == torch.float32 for value in acts.values)
        scores = engine.score(["Hi", "Hi there"], [[" a b"], [" c"]], plan=plan)
        assert np.isfinite(scores.log_prob).all()
        assert torch.equal(engine.logits("Hi", plan=plan.scaled(0)), engine.logits("Hi"))


# --- capture ------------------------------------------------------------------------------------------------------


def test_captured_values_are_huggingfaces_hidden_states(any_engine, references):
    name, engine = any_engine
    last = engine.info.n_layers - 1
    layers = [0, 1, last - 1]
    prompts = PROMPTS[:2]
    after = engine.capture(prompts, layers=layers)
    before = engine.capture(prompts, layers=[0, last], site="resid_pre")
    assert after.layers == (0, 1, last - 1)
    for i, ids in enumerate(after.prompt_token_ids):
        with torch.no_grad():
            hidden = references(name)(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for layer in layers:
            torch.testing.assert_close(after.of(i, layer), hidden[layer + 1][0], atol=1e-3, rtol=1e-4)
        for layer in (0, last):
            torch.testing.assert_close(before.of(i, layer), hidden[layer][0], atol=1e-3, rtol=1e-4)


def test_the_last_layer_is_captured_before_the_final_norm(tiny_llama_engine, references):
    model = references("tiny_llama_engine")
    found = tiny_llama_engine.capture("Hi there", layers=-1)
    ids = torch.tensor([found.prompt_token_ids[0]])
    with torch.no_grad():
        normed = model(ids, output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(model.model.norm(found[3]), normed, atol=1e-4, rtol=1e-4)


def test_the_sublayers_add_up(tiny_engine):
    _, engine = tiny_engine
    at = {s: engine.capture(PROMPTS, layers=2, site=s)[2] for s in ("resid_pre", "attn_out", "resid_mid", "mlp_out")}
    torch.testing.assert_close(at["resid_pre"] + at["attn_out"], at["resid_mid"], atol=1e-4, rtol=1e-4)
    after = engine.capture(PROMPTS, layers=2)[2]
    torch.testing.assert_close(at["resid_mid"] + at["mlp_out"], after, atol=1e-4, rtol=1e-4)


def test_positions_and_pools(tiny_llama_engine):
    whole = tiny_llama_engine.capture(PROMPTS, layers=[3, 0])
    inner = ~sl.where.index(0)
    prompts = [p for p in PROMPTS if len(tiny_llama_engine.tokenizer(p)["input_ids"]) > 1]
    part = tiny_llama_engine.capture(prompts, layers=0, where=inner)
    mean = tiny_llama_engine.capture(prompts, layers=0, where=inner, pool="mean")
    last = tiny_llama_engine.capture(prompts, layers=0, where=sl.where.last_prompt(), pool="last")
    assert whole.stack().shape[0] == 2
    assert mean[0].shape == (len(prompts), 64)
    for i, prompt in enumerate(prompts):
        values = whole.of(PROMPTS.index(prompt), 0)
        assert part.positions[i] == tuple(range(1, len(values)))
        torch.testing.assert_close(part.of(i, 0), values[1:], atol=1e-5, rtol=0)
        torch.testing.assert_close(mean.of(i, 0), values[1:].mean(0), atol=1e-5, rtol=0)
        torch.testing.assert_close(last.of(i, 0), values[-1], atol=1e-5, rtol=0)


def test_positions_that_a_prompt_lacks_are_an_error(tiny_llama_engine):
    with pytest.raises(InputError, match=r"index\(50\) selects no token in prompt 1"):
        tiny_llama_engine.capture([[5] * 60, [5] * 3], layers=0, where=sl.where.index(50))
    with pytest.raises(InputError, match=r"generated\(\) selects no token"):
        tiny_llama_engine.capture("Hi", layers=0, where=sl.where.generated())
    with pytest.raises(PlanError, match=r"sl\.where"):
        tiny_llama_engine.capture("Hi", layers=0, where="everywhere")
    with pytest.raises(InputError, match="pool"):
        tiny_llama_engine.capture("Hi", layers=0, pool="max")


# --- doses --------------------------------------------------------------------------------------------------------


def test_the_median_norm_is_measured_without_position_zero(tiny_llama_engine, references):
    from steerlab.core.shipped import reference_text

    ids = tiny_llama_engine.tokenizer(reference_text())["input_ids"]
    norms = []
    for start in range(0, len(ids), 256):
        with torch.no_grad():
            out = references("tiny_llama_engine")(torch.tensor([ids[start : start + 256]]), output_hidden_states=True)
        norms.append(out.hidden_states[3][0, 1:].norm(dim=-1))
    expected = torch.cat(norms).median().item()
    assert tiny_llama_engine.median_norm(2) == pytest.approx(expected, rel=1e-5)
    assert tiny_llama_engine.median_norm(-2) == tiny_llama_engine.median_norm(2, "resid_post")


def test_a_dose_adds_a_vector_of_that_many_median_norms(tiny_llama_engine):
    v = random_vector(tiny_llama_engine)
    plan = sl.Plan(sl.add(v, dose=0.25, where=sl.where.all()))
    plain, steered = (tiny_llama_engine.capture(PROMPTS, layers=2, plan=p)[2] for p in (None, plan))
    added = (steered - plain).norm(dim=-1)
    assert added.tolist() == pytest.approx([0.25 * tiny_llama_engine.median_norm(2)] * len(added), rel=1e-4)


# --- other quantities ---------------------------------------------------------------------------------------------


def test_measure_gives_your_own_quantities_per_target_token(tiny_llama_engine):
    plan = strong_plan(tiny_llama_engine)
    measures = {"log_prob": chosen_log_probs, "entropy": lambda logits, tokens: entropy(logits)}
    found = tiny_llama_engine.measure(PROMPTS[:2], [[" a b c"], [" d", " e f"]], measures, plan=plan)
    scores = tiny_llama_engine.score(PROMPTS[:2], [[" a b c"], [" d", " e f"]], plan=plan)
    assert [row["log_prob"].tolist() for row in found] == [list(t) for t in scores.token_log_probs]
    context = tiny_llama_engine.tokenizer(PROMPTS[0])["input_ids"]
    unsteered = tiny_llama_engine.measure(PROMPTS[0], [" a b c"], measures)[0]
    logits = tiny_llama_engine.logits([*context, *scores[0].token_ids])
    expected = entropy(logits[len(context) - 1 : -1])
    assert unsteered["entropy"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("logit_rows", [1, 3, 1000])
def test_measure_gives_several_numbers_per_token_too(tiny_llama_engine, logit_rows, monkeypatch):
    monkeypatch.setattr(teacher_forcing.Budget, "logit_rows", lambda self, d_vocab: logit_rows)
    plan, targets = strong_plan(tiny_llama_engine), [[" a b c"], [" d", " e f"]]
    measures = {
        "log_prob": chosen_log_probs,
        "all": lambda logits, tokens: logits.double().log_softmax(-1),
        "two": lambda logits, tokens: logits.topk(2).indices,
    }
    found = tiny_llama_engine.measure(PROMPTS[:2], targets, measures, plan=plan)
    receipts = tiny_llama_engine.receipts
    scores = tiny_llama_engine.score(PROMPTS[:2], targets, plan=plan)
    assert receipts == tiny_llama_engine.receipts
    for row, score in zip(found, scores, strict=True):
        n = score.num_tokens
        assert (row["log_prob"].dtype, row["log_prob"].shape) == (np.float64, (n,))
        assert (row["all"].dtype, row["all"].shape) == (np.float32, (n, tiny_llama_engine.info.d_vocab))
        assert (row["two"].dtype, row["two"].shape) == (np.float32, (n, 2))
        np.testing.assert_allclose(row["all"][np.arange(n), list(score.token_ids)], score.token_log_probs, atol=1e-5)
        np.testing.assert_allclose(np.exp(row["all"]).sum(axis=1), 1.0, atol=1e-5)
        assert row["two"][:, 0].tolist() == row["all"].argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("measure", "seen"),
    [
        (lambda logits, tokens: logits.sum(), r"\(\)"),
        (lambda logits, tokens: logits[:0], r"\(0, 384\)"),
        (lambda logits, tokens: logits[..., None], r"\(1, 384, 1\)"),
        (lambda logits, tokens: tokens.tolist(), "list"),
    ],
)
def test_a_measure_of_another_shape_is_refused_by_name(tiny_llama_engine, measure, seen):
    with pytest.raises(InputError, match=rf"'mine' returned {seen} for 1 tokens"):
        tiny_llama_engine.measure("Hi", [[5]], {"mine": measure})


def test_extract_is_the_mean_difference_of_captures(tiny_llama_engine):
    pairs = sl.ContrastPairs.from_lists(PROMPTS[:4], PROMPTS[4:])
    vectors = sl.extract(tiny_llama_engine, pairs, layers=[1, -1], name="test")
    assert list(vectors) == [1, 3]
    last = {"layers": [1, 3], "where": sl.where.last_prompt(), "pool": "last"}
    positive, negative = (tiny_llama_engine.capture(side, **last) for side in (PROMPTS[:4], PROMPTS[4:]))
    for layer in (1, 3):
        expected = (positive[layer] - negative[layer]).mean(0)
        torch.testing.assert_close(vectors[layer].values, expected, atol=1e-5, rtol=0)
    card = vectors[1].card
    info = tiny_llama_engine.info
    assert (card.method, card.n_pairs, card.data_hash, card.name) == ("mean_diff", 4, pairs.hash, "test")
    assert (card.model, card.weights_hash, card.weight_processing) == (info.name, info.weights_hash, "none")
    assert card.extracted_at == "blocks.1.hook_resid_post"
    assert card.median_norm == tiny_llama_engine.median_norm(1)
    assert {"torch", "transformers", "transformer-lens"} <= set(card.versions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_llama_engine.logits("Hi", plan=sl.Plan(sl.add(vectors[1], dose=0.1)))


def test_extract_reads_where_and_how_it_is_told(tiny_llama_engine):
    pairs = sl.ContrastPairs.from_lists(PROMPTS[:4], PROMPTS[4:])
    vector = sl.extract(tiny_llama_engine, pairs, layers=2, site="mlp_out", read=sl.where.all())[2]
    options = {"layers": 2, "site": "mlp_out", "pool": "mean"}
    positive, negative = (tiny_llama_engine.capture(side, **options)[2] for side in (PROMPTS[:4], PROMPTS[4:]))
    torch.testing.assert_close(vector.values, (positive - negative).mean(0), atol=1e-5, rtol=0)
    assert vector.card.read == {"kind": "all"}
    with pytest.raises(InputError, match="known: mean_diff"):
        sl.extract(tiny_llama_engine, pairs, "magic")


@pytest.mark.usefixtures("unchecked_types")
def test_extract_without_a_pool_is_refused_rather_than_wrong(tiny_llama_engine):
    pairs = sl.ContrastPairs.from_lists(PROMPTS[:4], PROMPTS[4:])
    with pytest.raises(InputError, match="one row per prompt"):
        sl.extract(tiny_llama_engine, pairs, pool=None, read=sl.where.all())


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_is_refused_before_anything_runs(tiny_llama_engine):
    narrow = sl.SteeringVector.from_tensor(torch.ones(32), layer=1)
    deep = random_vector(tiny_llama_engine, layer=4)
    for call in (lambda p: greedy(tiny_llama_engine, "Hi", plan=p), lambda p: tiny_llama_engine.logits("Hi", plan=p)):
        with pytest.raises(VectorShapeError, match=r"\[32\].*\[64\]"):
            call(sl.Plan(sl.add(narrow, coef=1.0)))
        with pytest.raises(HookPointError, match="Layer 4 does not exist"):
            call(sl.Plan(sl.add(deep, coef=1.0)))


def test_past_the_context_is_an_error_that_says_by_how_much(tiny_llama_engine):
    engine = tiny_llama_engine
    with pytest.raises(ContextLengthError, match="257 tokens, 1 more than the context of 256"):
        engine.capture([[5] * 257], layers=0)
    with pytest.raises(ContextLengthError, match="260 tokens, 4 more"):
        engine.generate([[5] * 250], max_new_tokens=10)
    with pytest.raises(ContextLengthError, match=r"Row 1.*258 tokens, 2 more"):
        engine.score([[5], [5] * 250], [[[6]], [[6] * 8]])
    assert len(greedy(engine, [[5] * 250])[0].token_ids) <= 6
    assert engine.score([[5] * 250], [[[6] * 6]])[0].num_tokens == 6


def test_a_closed_engine_lets_go_of_the_model(tiny_llama_path):
    with sl.load(tiny_llama_path, device="cpu") as engine:
        assert engine.model is not None
    assert engine.model is None
