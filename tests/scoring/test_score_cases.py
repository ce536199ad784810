"""Scores of the TransformerLens engine on inputs that people who do this job ran into."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.core.errors import ContextLengthError, TargetError
from steerlab.measures import chosen_log_probs, entropy

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


def test_s5_left_padding_changes_no_score(lens_engine):
    ids, target = [15496, 11, 616], [1131, 314, 253]
    alone = lens_engine.score([ids], [[target]])[0]
    padded = lens_engine.score([[*range(100, 140)], ids], [[[7]], [target]])[1]
    assert padded.token_log_probs == pytest.approx(alone.token_log_probs, abs=1e-4)


# --- boundaries and variants --------------------------------------------------------------------------------------


def test_s6_a_target_merged_into_its_prompt_is_finite_flagged_and_whole(tiny_llama_engine):
    tokenizer = tiny_llama_engine.tokenizer
    whole, part = tiny_llama_engine.score(["harb", "She opened the harb"], [["our"], ["our"]])
    for score, text in ((whole, "harb"), (part, "She opened the harb")):
        assert score.boundary == "merged"
        assert score.num_tokens >= 1
        assert all(map(math.isfinite, score.token_log_probs))
        joint = tokenizer(text + "our")["input_ids"]
        assert score.token_ids == tuple(joint[len(joint) - score.num_tokens :])


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


def test_token_ids_have_no_variants(tiny_llama_engine):
    with pytest.raises(TargetError, match="cannot be put before the token ids"):
        tiny_llama_engine.score("Hi", [[5]], variants=(" ",))


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_s8_shifted_logits_give_the_same_entropy_and_no_positive_log_prob(tiny_llama_engine, shift):
    measures = {
        "entropy": lambda logits, tokens: entropy(logits),
        "shifted": lambda logits, tokens: entropy(logits + shift),
        "log_prob": lambda logits, tokens: chosen_log_probs(logits + shift, tokens),
        "masked": lambda logits, tokens: chosen_log_probs(logits.masked_fill(logits < 0, -math.inf), tokens),
    }
    (found,) = tiny_llama_engine.measure("She opened", [" the window, because"], measures)
    assert found["shifted"] == pytest.approx(found["entropy"], abs=5e-3)  # float32 holds 1e4 to 1e-3
    assert (found["log_prob"] <= 0).all()
    assert not np.isnan(found["masked"]).any()


def test_s9_two_windows_are_weighted_by_tokens_and_each_token_is_scored_once(tiny_llama_engine, huggingface):
    ids = torch.randint(3, 380, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    found = sl.perplexity(tiny_llama_engine, ids, context_length=20, stride=20)
    expected = [*reference(huggingface, ids[:1], ids[1:20]), *reference(huggingface, ids[10:20], ids[20:])]
    assert found.num_tokens == len(ids) - 1
    assert found.nll == pytest.approx(-np.mean(expected), abs=1e-5)
    assert sl.perplexity(tiny_llama_engine, ids, context_length=20, stride=5).num_tokens == found.num_tokens


def test_s10_a_target_longer_than_the_context_is_an_error(tiny_llama_engine):
    context = tiny_llama_engine.info.context_length
    with pytest.raises(ContextLengthError, match=f"{context + 1} tokens, 1 more than the context of {context}"):
        tiny_llama_engine.score([[5]], [[[6] * context]])
    assert tiny_llama_engine.score([[5]], [[[6] * (context - 1)]])[0].num_tokens == context - 1


# --- invariance ---------------------------------------------------------------------------------------------------


# Log-probabilities near -10 nats are 1e-6 apart in float32, and another batch shape sums in another order.
ROUNDING = 5e-5


@pytest.mark.parametrize("steered", [False, True])
@settings(max_examples=25)
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
