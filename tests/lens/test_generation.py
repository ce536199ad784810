import math

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.measures import apply_repetition_penalty, chosen_log_probs, log_q
from tests.lens.helpers import PROMPTS, strong_plan

GREEDY = sl.SamplingPolicy.greedy()
POLICY = sl.SamplingPolicy(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01)


# --- greedy -------------------------------------------------------------------------------------------------------


def test_greedy_equals_huggingfaces_generate(any_engine, references):
    name, engine = any_engine
    model = references(name)
    for prompt in PROMPTS[:3]:
        (found,) = engine.generate(prompt, policy=GREEDY, max_new_tokens=12)
        ids = torch.tensor([engine.tokenizer(prompt)["input_ids"]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, repetition_penalty=1.0
        )
        assert found.token_ids == out[0, ids.shape[1] :].tolist()
        assert found.token_log_qs == [0.0] * len(found.token_ids)


def test_the_real_model_knows_its_capitals(lens_engine):
    (found,) = lens_engine.generate("The capital of France is", policy=GREEDY, max_new_tokens=2)
    assert found.text.startswith(" Paris")


# --- sampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_recorded_figures_are_those_of_the_measures(tiny_engine, penalty):
    _, engine = tiny_engine
    policy = sl.SamplingPolicy(0.8, 0.9, 30, 0.01, penalty)
    plan = strong_plan(engine, where=sl.where.all())
    out = engine.generate(PROMPTS[:3], plan=plan, policy=policy, max_new_tokens=8, n=2, seed=5)
    for completion in out:
        prompt = out.prompt_token_ids[completion.prompt_index]
        ids = [*prompt, *completion.token_ids]
        logits = engine.logits(ids, plan=plan)[len(prompt) - 1 : -1]
        tokens = torch.tensor(completion.token_ids)
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for step in range(len(tokens)):
            seen[step, ids[: len(prompt) + step]] = True
        expected = log_q(apply_repetition_penalty(logits, seen, policy), tokens, policy)
        assert completion.token_log_qs == pytest.approx(expected.tolist(), abs=1e-3)
        assert completion.token_log_probs == pytest.approx(chosen_log_probs(logits, tokens).tolist(), abs=1e-3)
        assert completion.log_q == pytest.approx(sum(completion.token_log_qs))


def test_under_the_default_policy_log_q_is_log_p(tiny_llama_engine):
    (found,) = tiny_llama_engine.generate("Hi", max_new_tokens=8)
    assert found.token_log_qs == pytest.approx(found.token_log_probs, abs=1e-5)


def test_a_rows_draws_do_not_depend_on_its_batch(tiny_engine):
    _, engine = tiny_engine
    seeds = list(range(10, 18))
    together = engine.generate(PROMPTS, policy=POLICY, max_new_tokens=8, n=2, seed=seeds)
    for i in (0, 3, 7):
        alone = engine.generate(PROMPTS[i], policy=POLICY, max_new_tokens=8, n=2, seed=[seeds[i]])
        assert [c.token_ids for c in alone] == [c.token_ids for c in together if c.prompt_index == i]
        single = engine.generate(PROMPTS[i], policy=POLICY, max_new_tokens=8, n=2, seed=seeds[i])
        assert [c.token_ids for c in single] == [c.token_ids for c in alone]
    pair = engine.generate([PROMPTS[5], PROMPTS[0]], policy=POLICY, max_new_tokens=8, seed=[99, seeds[0]])
    assert pair[1].token_ids == together[0].token_ids


def test_global_random_state_is_neither_used_nor_moved(tiny_llama_engine):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = tiny_llama_engine.generate("Hi", policy=POLICY, max_new_tokens=6)[0].token_ids
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert tiny_llama_engine.generate("Hi", policy=POLICY, max_new_tokens=6)[0].token_ids == first


def test_more_tokens_begin_with_the_fewer(tiny_llama_engine):
    short, long = (tiny_llama_engine.generate("Hi", policy=POLICY, max_new_tokens=m)[0].token_ids for m in (3, 9))
    assert long[:3] == short


def test_every_step_draws_anew(tiny_llama_engine):
    flat = sl.SamplingPolicy(temperature=1e6)  # nothing but the draws decides
    (row,) = tiny_llama_engine.generate("Hi", policy=flat, max_new_tokens=20, seed=1)
    assert len(set(row.token_ids)) > len(row.token_ids) / 2


def test_samples_of_a_prompt_differ_and_come_in_order(tiny_llama_engine):
    out = tiny_llama_engine.generate(PROMPTS[:2], max_new_tokens=8, n=3, seed=0)
    assert [(c.prompt_index, c.sample_index) for c in out] == [(i, g) for i in range(2) for g in range(3)]
    assert len({tuple(c.token_ids) for c in out}) == 6
    alone = tiny_llama_engine.generate(PROMPTS[:2], max_new_tokens=8, n=1, seed=0)
    assert [c.token_ids for c in alone] == [out[0].token_ids, out[3].token_ids]


def test_first_tokens_follow_the_distribution(tiny_llama_engine):
    policy = sl.SamplingPolicy(top_k=3)
    out = tiny_llama_engine.generate("Hi", policy=policy, max_new_tokens=1, n=600, seed=0)
    logits = tiny_llama_engine.logits("Hi")[-1]
    top = logits.topk(3)
    counts = [sum(c.token_ids[0] == token for c in out) for token in top.indices.tolist()]
    assert sum(counts) == 600
    for count, p in zip(counts, top.values.softmax(-1).tolist(), strict=True):
        assert abs(count - 600 * p) < 5 * math.sqrt(600 * p * (1 - p)) + 1


# --- ends ---------------------------------------------------------------------------------------------------------


def with_eos(engine, monkeypatch, ids):
    monkeypatch.setattr(engine.model.original_model.generation_config, "eos_token_id", ids)


def test_a_row_ends_at_eos_and_the_others_go_on(tiny_llama_engine, monkeypatch):
    free = tiny_llama_engine.generate(PROMPTS, policy=GREEDY, max_new_tokens=8)
    # the third token of row 1 becomes an EOS (in a list, as some checkpoints have it)
    with_eos(tiny_llama_engine, monkeypatch, [380, free[1].token_ids[2]])
    out = tiny_llama_engine.generate(
        PROMPTS, policy=GREEDY, max_new_tokens=8, plan=strong_plan(tiny_llama_engine).scaled(0)
    )
    for before, after in zip(free, out, strict=True):
        ended = [k for k, token in enumerate(before.token_ids) if token == free[1].token_ids[2]]
        if ended:
            assert after.finish_reason == "eos"
            assert after.token_ids == before.token_ids[: ended[0] + 1]
            assert after.token_log_probs == pytest.approx(before.token_log_probs[: ended[0] + 1], abs=1e-4)
        else:
            assert (after.finish_reason, after.token_ids) == ("length", before.token_ids)
    assert {c.finish_reason for c in out} == {"eos", "length"}


def test_every_row_at_eos_stops_the_loop(tiny_llama_engine, monkeypatch):
    with_eos(tiny_llama_engine, monkeypatch, list(range(384)))
    out = tiny_llama_engine.generate(PROMPTS, max_new_tokens=8, plan=strong_plan(tiny_llama_engine))
    assert [(len(c.token_ids), c.finish_reason) for c in out] == [(1, "eos")] * 8
    assert [r.edited for r in tiny_llama_engine.receipts] == [1] * 8


def test_a_stop_string_cuts_the_text_and_keeps_the_completing_token(lens_engine):
    prompt = "The capital of France is"
    (free,) = lens_engine.generate(prompt, policy=GREEDY, max_new_tokens=8)
    assert "." in free.text
    (found,) = lens_engine.generate(prompt, policy=GREEDY, max_new_tokens=8, stop=["nowhere", "."])
    assert found.finish_reason == "stop"
    assert found.text == free.text[: free.text.index(".")]
    assert found.token_ids == free.token_ids[: len(found.token_ids)]
    assert "." in lens_engine.tokenizer.decode(found.token_ids)
    assert "." not in lens_engine.tokenizer.decode(found.token_ids[:-1])


def test_a_stop_string_may_span_tokens(tiny_llama_engine):
    (free,) = tiny_llama_engine.generate(PROMPTS[1], policy=GREEDY, max_new_tokens=10)
    decode = tiny_llama_engine.tokenizer.decode
    joint = decode(free.token_ids[2:4])
    if joint in decode(free.token_ids[:3]):
        pytest.fail("choose other tokens")
    (found,) = tiny_llama_engine.generate(PROMPTS[1], policy=GREEDY, max_new_tokens=10, stop=joint)
    assert found.token_ids == free.token_ids[:4]
    assert found.text == decode(free.token_ids[:2])


def test_the_prompt_does_not_trigger_a_stop_string(lens_engine):
    (found,) = lens_engine.generate("The capital of France is", policy=GREEDY, max_new_tokens=1, stop="capital")
    assert found.finish_reason == "length"


def test_the_earliest_stop_string_counts(lens_engine):
    (free,) = lens_engine.generate("The capital of France is", policy=GREEDY, max_new_tokens=3)
    last, first = free.text[4], free.text[2]
    (found,) = lens_engine.generate("The capital of France is", policy=GREEDY, max_new_tokens=3, stop=[last, first])
    assert free.text.startswith(" Paris")
    assert found.text == " P"


def test_no_new_tokens_returns_the_prompts(tiny_llama_engine):
    plan = strong_plan(tiny_llama_engine)
    out = tiny_llama_engine.generate(["Hi", "Two plus"], max_new_tokens=0, plan=plan)
    assert [(c.text, c.token_ids, c.finish_reason, c.log_q) for c in out] == [("", [], "length", 0.0)] * 2
    assert out.prompt_token_ids[0] == tuple(tiny_llama_engine.tokenizer("Hi")["input_ids"])
    assert [r.edited for r in tiny_llama_engine.receipts] == [0, 0]


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"n": 1.0},
        {"seed": -1},
        {"seed": [1, 2]},
        {"stop": [""]},
        {"stop": ""},
    ],
)
def test_bad_options_are_refused(tiny_llama_engine, options):
    with pytest.raises(InputError):
        tiny_llama_engine.generate("Hi", **({"max_new_tokens": 1} | options))
