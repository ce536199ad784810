import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.metrics import cohen_kappa_score

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.engines.toy import ToyEngine
from steerlab.scoring.judging.agreement import parse_label
from steerlab.scoring.judging.rubric import filled

RUBRIC = "Text: {text}\nIs it kind? Rating from 0 to 2:"
TEXTS = ["Thank you so much.", "Go away.", "The ferry leaves at noon."]


@pytest.fixture(scope="module")
def toy():
    return ToyEngine()


def next_probs(engine, prompt, label):
    """Softmax of the logits after prompt, at each token of a label, without the package's scoring."""
    whole = engine.tokenizer(prompt + label, add_special_tokens=False)["input_ids"]
    cut = len(engine.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    logits = engine._forward(whole, lambda point, h: h)
    probs = torch.softmax(logits.double(), dim=-1)
    return math.prod(float(probs[place - 1, whole[place]]) for place in range(cut, len(whole)))


def test_ratings_are_the_models_probabilities_renormalised(toy):
    judge = sl.judge(toy, RUBRIC)
    found = judge.rate(TEXTS)
    for text, row in zip(TEXTS, found.rows.itertuples(), strict=True):
        probs = np.array([next_probs(toy, filled(RUBRIC, {"text": text}), f" {label}") for label in "012"])
        assert row.mass == pytest.approx(probs.sum(), rel=1e-4)
        share = probs / probs.sum()
        assert [row.p_0, row.p_1, row.p_2] == pytest.approx(share, rel=1e-4)
        assert row.expected == pytest.approx(share @ [0, 1, 2], rel=1e-4)
        assert row.entropy == pytest.approx(stats.entropy(share), rel=1e-4)
        assert row.mode == "012"[share.argmax()]
    assert found.ratings == pytest.approx(found.rows.expected)


def test_labels_of_several_tokens_are_scored_whole(toy):
    """On a tokenizer of bytes `10` takes two tokens, of which `1` is the first."""
    found = sl.judge(toy, RUBRIC, ("1", "10")).rate(TEXTS[:1])
    prompt = filled(RUBRIC, {"text": TEXTS[0]})
    one, ten = (next_probs(toy, prompt, label) for label in (" 1", " 10"))
    assert found.probs()[0] == pytest.approx([(one - ten) / one, ten / one], rel=1e-4)
    assert found.rows.mass[0] == pytest.approx(one, rel=1e-4)


def test_texts_together_are_texts_alone(tiny_llama_engine):
    judge = sl.judge(tiny_llama_engine, {"kind": RUBRIC, "short": "How short is {text}? Answer:"})
    together = judge.rate(TEXTS)
    alone = [judge.rate([text]) for text in TEXTS]
    assert together.ratings == pytest.approx([one.ratings[0] for one in alone], abs=1e-5)
    assert together.rows.rubric.tolist() == ["kind", "short"] * 3
    assert together.probs("kind").sum(axis=1) == pytest.approx(1)


def test_several_rubrics_become_one_rating(toy):
    rubrics = {"kind": RUBRIC, "short": "How short is {text}? Answer:"}
    found = sl.judge(toy, rubrics).rate(TEXTS)
    by_hand = []
    for text in range(len(TEXTS)):
        kind, short = found.probs("kind")[text], found.probs("short")[text]
        by_hand.append(
            sum(kind[i] * short[j] * (2 * i * j / (i + j) if i * j else 0) for i in range(3) for j in range(3))
        )
    assert found.ratings == pytest.approx(by_hand)
    plain = sl.judge(toy, rubrics, aggregate="mean").rate(TEXTS)
    assert plain.ratings == pytest.approx(plain.rows.groupby("text_index").expected.mean())


def test_a_judge_is_a_function_of_prompt_and_text(toy):
    judge = sl.judge(toy, "After {prompt} comes {text}. Rating:")
    assert judge("a", "b") == pytest.approx(judge.rate(["b"], prompts=["a"]).ratings[0])


def test_hashes_name_rubric_and_model(toy):
    same, other = sl.judge(toy, RUBRIC), sl.judge(toy, RUBRIC + " ")
    assert sl.judge(toy, RUBRIC).card == same.card
    elsewhere = sl.judge(ToyEngine(seed=1), RUBRIC)
    assert same.card.rubric_hash == elsewhere.card.rubric_hash != other.card.rubric_hash
    assert same.card.hash != elsewhere.card.hash
    assert other.card.lead == ""  # the rubric ends in a space of its own


# --- pairs ---------------------------------------------------------------------------------------------------------


def test_pairs_are_asked_in_both_orders(toy):
    rubric = "One: {a}\nTwo: {b}\nBetter is"
    judge = sl.judge(toy, rubric, {"1": 1, "2": 0})
    found = judge.compare(TEXTS[:2], TEXTS[1:])
    first = []
    for a, b in ((TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[0])):
        one, two = (next_probs(toy, filled(rubric, {"a": a, "b": b}), f" {label}") for label in "12")
        first.append(one / (one + two))
    row = found.rows.iloc[0]
    assert row.shown_first == pytest.approx(first[0], rel=1e-4)
    assert row.shown_second == pytest.approx(1 - first[1], rel=1e-4)
    assert row.preference == pytest.approx((first[0] + 1 - first[1]) / 2, rel=1e-4)
    assert row.bias == pytest.approx((first[0] + first[1]) / 2 - 0.5, rel=1e-4)
    assert found.position_bias == pytest.approx(found.rows.bias.mean())


def test_a_pair_turned_round_has_the_opposite_preference_and_the_same_bias(toy):
    judge = sl.judge(toy, "{a} or {b}? Answer", {"A": 1, "same": 0.5, "B": 0})
    one, other = judge.compare(TEXTS[:1], TEXTS[1:2]).rows.iloc[0], judge.compare(TEXTS[1:2], TEXTS[:1]).rows.iloc[0]
    assert one.preference == pytest.approx(1 - other.preference)
    assert one.bias == pytest.approx(other.bias)
    alike = judge.compare(TEXTS[:1], TEXTS[:1]).rows.iloc[0]
    assert alike.preference == pytest.approx(0.5)


# --- agreement -----------------------------------------------------------------------------------------------------


def test_labels_are_parsed_as_words_of_their_own():
    scale = ["0", "1", "2", "10"]
    assert [parse_label(reply, scale) for reply in ("10", " 2.", "a 1\n2", "21", "0.5", "x2", "none")] == [
        "10",
        "2",
        "1",
        None,
        None,
        None,
        None,
    ]


def test_agreement_with_people_and_with_replies(tiny_llama_engine):
    judge = sl.judge(tiny_llama_engine, RUBRIC)
    texts = [f"{word} {k}" for k in range(4) for word in ("cat", "dog", "bird")]
    labels = ["0", 1, "2", None] * 3
    found = judge.agreement(texts, labels=labels, max_new_tokens=4)
    assert found.table.compared.tolist() == ["ratings, greedy replies", "ratings, people", "greedy replies, people"]
    replies = tiny_llama_engine.generate(
        [filled(RUBRIC, {"text": text}) for text in texts], policy=sl.SamplingPolicy.greedy(), max_new_tokens=4
    ).texts
    assert found.rows.reply.tolist() == replies
    known = [k for k, label in enumerate(labels) if label is not None]
    people = [str(labels[k]) for k in known]
    modes = [judge.rate(texts).rows["mode"][k] for k in known]
    row = found.table.iloc[1]
    assert (row.texts, row.missing) == (9, 3)
    assert row.same == pytest.approx(np.mean([a == b for a, b in zip(modes, people, strict=True)]))
    assert row.kappa == pytest.approx(cohen_kappa_score(modes, people))
    expected = judge.rate(texts).rows.expected[known]
    assert row.spearman == pytest.approx(stats.spearmanr(expected, [int(p) for p in people]).statistic)
    assert found.unparseable == pytest.approx(np.mean([parse_label(r, ["0", "1", "2"]) is None for r in replies]))
    assert found.table.missing[0] == round(found.unparseable * len(texts))


def test_a_side_that_does_not_vary_has_no_kappa(toy):
    found = sl.judge(toy, RUBRIC).agreement(TEXTS[:1], labels=["1"], max_new_tokens=1)
    people = found.table[found.table.compared == "ratings, people"].iloc[0]
    assert math.isnan(people.spearman)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no place",), r"no place for what is judged"),
        (("{text}", ("good", "bad")), r"say what each counts"),
        (("{text}", ("1",)), r"two or more labels"),
        (("{text}", ("1", "1")), r"distinct"),
        (("{text}", (0, 1, 2)), r"are texts, as the judge writes them: \('0', '1', '2'\), not \[0, 1, 2\]"),
        (("{text}", np.arange(2)), r"\('0', '1'\)"),
        (("{text}", {0: 0.0, 1: 1.0}), r"\('0', '1'\)"),
        (("{text}", "012"), r"two or more labels"),
        (({},), r"no rubric"),
    ],
)
def test_bad_rubrics_and_scales_are_refused(toy, arguments, message):
    with pytest.raises(InputError, match=message):
        sl.judge(toy, *arguments)


def test_bad_calls_are_refused(toy):
    judge = sl.judge(toy, RUBRIC)
    with pytest.raises(InputError, match="list of strings"):
        judge.rate("one text")
    with pytest.raises(InputError, match=r"no place \{a\} and \{b\}"):
        judge.compare(["x"], ["y"])
    with pytest.raises(InputError, match="pass prompts="):
        sl.judge(toy, "{prompt} {text} Rating:").rate(["x"])
    with pytest.raises(InputError, match="3 texts and 1 labels"):
        judge.agreement(TEXTS, labels=["1"])
    with pytest.raises(InputError, match=r"one of \['0', '1', '2'\]"):
        judge.agreement(TEXTS, labels=["1", "7", "0"])
    with pytest.raises(InputError, match=r"one of \['0', '1', '2'\]"):
        judge.agreement(TEXTS, labels=["1", np.array([1, 2]), "0"])
    two_alike = sl.judge(toy, RUBRIC, scale={"no": 0, "never": 0, "yes": 1})
    with pytest.raises(InputError, match=r"\['no', 'never'\] all count 0"):
        two_alike.agreement(TEXTS, labels=[0, 1, "no"])
    with pytest.raises(InputError, match="one of harmonic_mean, mean"):
        sl.judge(toy, RUBRIC, aggregate="median")
    with pytest.raises(InputError, match="is an engine"):
        sl.judge("smollm2-135m", RUBRIC)
    with pytest.raises(InputError, match="no negative rating"):
        sl.judge(toy, {"a": RUBRIC, "b": RUBRIC}, ("-1", "1"))


def test_a_label_that_joins_the_rubric_is_refused(tiny_gpt2_engine):
    tokenizer = tiny_gpt2_engine.tokenizer
    joined = next(
        (word, cut)
        for word in sorted(tokenizer.get_vocab())
        for cut in range(1, len(word))
        if word.isalpha() and len(word) > 3
    )
    word, cut = joined
    with pytest.raises(InputError, match="joins the end of the rubric"):
        sl.judge(tiny_gpt2_engine, "{text} " + word[:cut], {word[cut:]: 1, "9": 0}, lead="").rate(["x"])


@pytest.mark.parametrize("nothing", [None, math.nan, np.float32("nan"), pd.NA, pd.NaT])
def test_a_label_that_nobody_gave_is_missing_however_it_is_written(toy, nothing):
    found = sl.judge(toy, RUBRIC).agreement(TEXTS, labels=["1", nothing, 2], max_new_tokens=1)
    people = found.table.set_index("compared").loc["ratings, people"]
    assert (people.texts, people.missing) == (2, 1)
