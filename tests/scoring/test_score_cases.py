"""Scores of the TransformerLens engine on inputs that people who do this job ran into."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import steerlab as sl

EOS_INSIDE = [10, 11, 1, 12, 13]
token_ids = st.integers(0, 383)
targets_of_one = st.lists(st.lists(token_ids, min_size=1, max_size=40), min_size=1, max_size=3)
headers = st.sampled_from([[], list(range(100, 170))])
rows = st.lists(st.tuples(st.lists(token_ids, min_size=1, max_size=40), targets_of_one), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def huggingface(tiny_llama_path):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_path, attn_implementation="eager").eval()


def reference(model, context, target):
    """Log p of each target token, each from an unpadded, uncached pass over exactly what stands before it."""
    found = []
    with torch.no_grad():
        for k, token in enumerate(target):
            logits = model(torch.tensor([[*context, *target[:k]]]), use_cache=False).logits[0, -1]
            found.append(logits.double().log_softmax(-1)[token].item())
    return found


# --- padding and special tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["eos_token", "bos_token"])
def test_s4_an_eos_is_scored_and_attended_to_and_padding_is_neither(tiny_llama_engine, huggingface, monkeypatch, pad):
    tokenizer = tiny_llama_engine.tokenizer
    monkeypatch.setattr(
        tokenizer, "_special_tokens_map", tokenizer._special_tokens_map | {"pad_token": getattr(tokenizer, pad)}
    )
    eos = tokenizer.eos_token_id
    assert eos in EOS_INSIDE
    prompts = [EOS_INSIDE, [eos, 10], [5]]
    targets = [[[20, eos], [21, eos, 22, 23]], [[eos]], [[eos, eos, 24]]]
    for score in tiny_llama_engine.score(prompts, targets):
        target = targets[score.prompt_index][score.target_index]
        expected = reference(huggingface, prompts[score.prompt_index], target)
        assert score.token_ids == tuple(target)
        assert score.token_log_probs == pytest.approx(expected, abs=1e-5)


# --- boundaries and variants --------------------------------------------------------------------------------------


def test_s7_the_first_token_is_scored_and_both_spellings_are_reported(lens_engine):
    scores = lens_engine.score(["The capital of France is"], [["Paris", "Berlin"]], variants=("", " "))
    assert [(s.target_index, s.variant) for s in scores] == [(0, ""), (0, " "), (1, ""), (1, " ")]
    assert all(math.isfinite(s.token_log_probs[0]) for s in scores)
    assert scores[1].log_prob > scores[0].log_prob + 1
    separately = lens_engine.score("The capital of France is", ["Paris", " Paris", "Berlin", " Berlin"])
    assert scores.token_ids == separately.token_ids
    assert scores.log_prob.tolist() == pytest.approx(separately.log_prob.tolist(), abs=1e-5)
    assert [s.num_bytes for s in scores] == [5, 6, 6, 7]
    assert scores.bits_per_byte[1] == pytest.approx(-scores[1].log_prob / math.log(2) / 6)
    frame = scores.tokens_frame(lens_engine.tokenizer)
    assert "".join(frame[(frame.target_index == 1) & (frame.variant == " ")].token) == " Berlin"


def test_variants_meet_plans_and_eos(tiny_llama_engine):
    engine = tiny_llama_engine
    values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(0))
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=2), coef=3.0))
    prompts, plans = ["Where did you", "The soup"], [None, plan]
    both = engine.score(prompts, [["put"], ["was", "is"]], plan=plans, variants=(" ", ""), score_eos=True)
    assert [(r.prompt_index, r.row_index) for r in engine.receipts] == [(0, 0), (0, 1), *((1, k) for k in range(2, 6))]
    assert [r.edited > 0 for r in engine.receipts] == [False, False, True, True, True, True]
    spaced = engine.score(prompts, [[" put"], [" was", " is"]], plan=plans, score_eos=True)
    assert both.log_prob[::2].tolist() == pytest.approx(spaced.log_prob.tolist(), abs=1e-5)
    assert {ids[-1] for ids in both.token_ids} == {engine.tokenizer.eos_token_id}


# --- invariance ---------------------------------------------------------------------------------------------------


# Log-probabilities near -10 nats are 1e-6 apart in float32, and another batch shape sums in another order.
ROUNDING = 5e-5


@pytest.mark.parametrize("steered", [False, True])
@settings(max_examples=12)
@given(data=st.data())
def test_s11_order_batch_and_header_change_no_score(tiny_llama_engine, huggingface, steered, data):
    engine = tiny_llama_engine
    header, tails = data.draw(headers), data.draw(rows)
    order = data.draw(st.permutations(range(len(tails))))
    values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(0))
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), coef=0.5)) if steered else None
    prompts, targets = [[*header, *prompt] for prompt, _ in tails], [row for _, row in tails]
    together = engine.score(prompts, targets, plan=plan)
    shuffled = engine.score([prompts[i] for i in order], [targets[i] for i in order], plan=plan)
    for i, (prompt, row) in enumerate(zip(prompts, targets, strict=True)):
        moved = shuffled.of(order.index(i))
        for j, target in enumerate(row):
            alone = engine.score([prompt], [[target]], plan=plan)[0]
            score = together.of(i)[j]
            assert score.token_ids == tuple(target)
            assert score.token_log_probs == pytest.approx(alone.token_log_probs, abs=ROUNDING)
            assert score.token_log_probs == pytest.approx(moved[j].token_log_probs, abs=ROUNDING)
    if not steered:
        last = len(tails) - 1
        expected = reference(huggingface, prompts[last], targets[last][0])
        assert together.of(last)[0].token_log_probs == pytest.approx(expected, abs=ROUNDING)


def test_s11_the_same_call_again_gives_the_same_to_the_bit(tiny_llama_engine):
    prompts, targets = ["Where did you put", "The soup"], [[" the keys", " it"], [" was"]]
    first, second = (tiny_llama_engine.score(prompts, targets) for _ in range(2))
    assert first == second
