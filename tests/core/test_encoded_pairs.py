from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core._encoded_pairs import check_variants, encode_pairs, spelled_bytes
from steerlab.core._text import encode_pair, encode_prompt
from steerlab.core.errors import TargetError
from tests.tiny_models import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer(chat=True)
D_VOCAB = len(TOKENIZER)


def prompts(*texts):
    return [encode_prompt(TOKENIZER, text, d_vocab=D_VOCAB) for text in texts]


def pairs(texts, targets, **options):
    return encode_pairs(TOKENIZER, prompts(*texts), targets, d_vocab=D_VOCAB, **options)


def ids(text):
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


# --- variants -----------------------------------------------------------------------------------------------------


def test_every_target_is_scored_once_per_variant_in_order_of_prompt_target_variant():
    found = pairs(["It was", "The soup"], [["seven", " noon"], ["old"]], variants=("", " "))
    assert [(i, j, p.variant) for i, j, p in found] == [
        (0, 0, ""),
        (0, 0, " "),
        (0, 1, ""),
        (0, 1, " "),
        (1, 0, ""),
        (1, 0, " "),
    ]
    strings = ["seven", " seven", " noon", "  noon"]
    prompt = prompts("It was")[0]
    for (_, _, pair), string in zip(found, strings, strict=False):
        alone = encode_pair(TOKENIZER, prompt, string, d_vocab=D_VOCAB)
        assert (pair.context_ids, pair.target_ids, pair.boundary) == (
            alone.context_ids,
            alone.target_ids,
            alone.boundary,
        )


def test_one_variant_of_ones_own():
    ((_, _, pair),) = pairs(["Where"], [["it"]], variants=[" was "], boundary="separate")
    assert pair.target_ids == ids(" was it")
    assert pair.variant == " was "


def test_ids_have_no_variants():
    with pytest.raises(TargetError, match=r"variant ' ' cannot be put before the token ids \[5, 6\]"):
        pairs(["It"], [[[5, 6]]], variants=("", " "))
    ((_, _, pair),) = pairs(["It"], [[[5, 6]]])
    assert (pair.target_ids, pair.variant) == ((5, 6), "")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (" ", r"sequence of prefixes, e\.g\. \('', ' '\); got ' '"),
        ((), "There are no variants"),
        ((" ", None), "string to put before each target, got None"),
        (("", ""), "listed twice"),
        ({"", " "}, "sequence of prefixes"),
    ],
)
def test_what_is_no_variant_is_refused(bad, said):
    with pytest.raises(TargetError, match=said):
        check_variants(bad)


# --- EOS ----------------------------------------------------------------------------------------------------------


def test_eos_follows_every_variant_and_spells_nothing():
    plain = pairs(["It was"], [["seven"]], variants=("", " "))
    ended = pairs(["It was"], [["seven"]], variants=("", " "), score_eos=True)
    for (_, _, a), (_, _, b) in zip(plain, ended, strict=True):
        assert b.target_ids == (*a.target_ids, TOKENIZER.eos_token_id)
        assert b.num_bytes == a.num_bytes


@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(eos_token_id=None)])
def test_eos_that_is_not_there(tokenizer):
    with pytest.raises(TargetError, match="score_eos=True needs an EOS"):
        encode_pairs(tokenizer, prompts("It"), [[[5]]], d_vocab=D_VOCAB, score_eos=True)


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", ["joint", "separate"])
@pytest.mark.parametrize("target", [" seven", "é", " 東京, ✓", "; it is"])
def test_clean_targets_count_their_own_bytes(boundary, target):
    ((_, _, pair),) = pairs(["The ferry leaves at"], [[target]], boundary=boundary)
    assert pair.boundary == "clean"
    assert pair.num_bytes == len(target.encode())


def test_after_a_merged_boundary_the_prompts_rescored_characters_count():
    ((_, _, pair),) = pairs(["The harb"], [["our at"]])
    assert pair.boundary == "merged"
    rescored = "The harbour at".removeprefix(TOKENIZER.decode(pair.context_ids))
    assert len(rescored) > len("our at")
    assert pair.num_bytes == len(rescored)


def test_a_character_cut_by_the_boundary_counts_where_it_ends():
    city = ids("東")
    assert len(city) > 1
    assert spelled_bytes(TOKENIZER, (*ids("a"), *city[:1]), city[1:]) == 3
    assert spelled_bytes(TOKENIZER, (*ids("a"), *city), ids("b")) == 1
    assert spelled_bytes(TOKENIZER, ids("a"), city[:-1]) == 0


def test_special_tokens_spell_nothing_and_without_a_tokenizer_nothing_is_counted():
    assert spelled_bytes(TOKENIZER, ids("a"), [TOKENIZER.eos_token_id]) == 0
    ((_, _, pair),) = encode_pairs(None, prompts("It"), [[[5]]], d_vocab=D_VOCAB)
    assert pair.num_bytes is None


@given(st.text(max_size=30), st.text(min_size=1, max_size=10))
def test_bytes_of_context_and_target_add_up(context, target):
    first, second = ids(context), ids(target)
    whole = len((context + target).replace("\ufffd", "").encode())
    assert spelled_bytes(TOKENIZER, (), first) + spelled_bytes(TOKENIZER, first, second) == whole
