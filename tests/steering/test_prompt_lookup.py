import pytest
import torch

import steerlab as sl
from steerlab.core._text import encode_prompt, token_offsets
from steerlab.core.errors import PlanError
from steerlab.steering.positions import where
from steerlab.steering.positions._prompt_lookup import PromptContent, looks_at_prompts, marks_for
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions.where import from_json


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_engine):
    return tiny_llama_engine.tokenizer


def content(tokenizer, prompt, index=0, n_prompts=1, **options):
    encoded = encode_prompt(tokenizer, prompt, d_vocab=1 << 40, **options)
    return PromptContent(index, n_prompts, encoded.token_ids, encoded.text, tokenizer)


def spelled(tokenizer, prompt, span, **options):
    found = content(tokenizer, prompt, **options)
    return [tokenizer.decode([found.token_ids[p]]) for p in found.find(span)]


# --- span ---------------------------------------------------------------------------------------------------------


def test_a_span_is_the_tokens_that_share_a_character_with_the_text(smollm2_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    text = "The capital of France is large, and France is old."
    assert spelled(tokenizer, text, where.span("France")) == [" France", " France"]
    assert spelled(tokenizer, text, where.span("France", occurrence=0)) == [" France"]
    assert (
        content(tokenizer, text).find(where.span("France", occurrence=-1))
        == [
            position
            for position, token in enumerate(tokenizer(text)["input_ids"])
            if tokenizer.decode([token]) == " France"
        ][-1:]
    )
    assert spelled(tokenizer, text, where.span("l of Fr")) == [" capital", " of", " France"]
    chat = content(tokenizer, "Hello France", chat=True)
    assert [tokenizer.decode([chat.token_ids[p]]) for p in chat.find(where.span("France"))] == [" France"]


def test_a_span_is_found_in_prompts_of_ids_through_what_they_spell(tokenizer):
    text = "the cat sat on the mat"
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    by_text = content(tokenizer, text)
    offset = len(by_text.token_ids) - len(ids)
    assert [p - offset for p in by_text.find(where.span("cat"))] == PromptContent(0, 1, ids, None, tokenizer).find(
        where.span("cat")
    )


def test_offsets_of_a_text_cover_its_characters_in_order(tokenizer):
    for prompt in ("naïve café, 東京 🙂 end", "plain words"):
        found = content(tokenizer, prompt)
        text, offsets = token_offsets(tokenizer, found.token_ids, found.text)
        assert text == prompt
        covered = {c for start, stop in offsets for c in range(start, stop)}
        assert {c for c, char in enumerate(text) if char != " "} <= covered
        decoded, from_ids = token_offsets(tokenizer, found.token_ids, None)
        assert len(from_ids) == len(offsets)
        assert all(stop <= len(decoded) for _, stop in from_ids)


def test_a_text_that_is_not_there_is_an_error_unless_told_otherwise(tokenizer):
    with pytest.raises(PlanError, match=r"Prompt 3 does not hold span\('dog'\)"):
        content(tokenizer, "the cat", index=3, n_prompts=4).find(where.span("dog"))
    with pytest.raises(PlanError, match="does not hold"):
        content(tokenizer, "the cat").find(where.span("cat", occurrence=1))
    assert content(tokenizer, "the cat").find(where.span("dog", missing="skip")) == []


# --- mask ---------------------------------------------------------------------------------------------------------


def test_a_mask_has_a_row_per_prompt_or_one_for_all(tokenizer):
    mask = where.mask(torch.tensor([[True, False, True], [False, True, False]]))
    assert [content(tokenizer, "a b c d", i, 2).find(mask) for i in (0, 1)] == [[0, 2], [1]]
    one = where.mask([False, True])
    assert [content(tokenizer, "a b c d", i, 3).find(one) for i in (0, 1, 2)] == [[1], [1], [1]]
    with pytest.raises(PlanError, match="2 rows and the call 3 prompts"):
        content(tokenizer, "a b", 0, 3).find(mask)


@pytest.mark.parametrize("values", [torch.ones(2, 2), torch.ones(1, 1, 1, dtype=torch.bool), [False, False]])
def test_a_mask_that_is_none_is_refused(values):
    with pytest.raises(PlanError, match="mask"):
        where.mask(values)


# --- tables -------------------------------------------------------------------------------------------------------


def test_marked_sets_resolve_to_absolute_positions_and_never_to_padding(tokenizer):
    mask = where.mask(torch.tensor([[True, False, True], [True, True, False]]))
    contents = [PromptContent(i, 2, (1, 2, 3)[: 3 - i]) for i in range(2)]
    marks = marks_for([mask, where.all()], contents)
    rows = RowPositions.of_tokens([[1, 2, 3, 4], [1, 2, 3]], [3, 2], marks)
    assert rows.positions.tolist() == [[0, 1, 2, 3], [-1, 0, 1, 2]]
    assert mask.resolve(rows).tolist() == [[True, False, True, False], [False, True, True, False]]
    assert (~mask).resolve(rows).tolist() == [[False, True, False, True], [False, False, False, True]]
    assert (mask & where.last_prompt()).resolve(rows).tolist() == [
        [False, False, True, False],
        [False, False, True, False],
    ]


def test_sets_that_do_not_look_at_prompts_need_no_tables():
    assert marks_for([where.default(), where.ids(3)], None) is None
    assert looks_at_prompts([where.ids(3) | where.all()]) is False
    assert looks_at_prompts([~(where.ids(3) | where.span("x"))]) is True
    with pytest.raises(PlanError, match="not known"):
        marks_for([where.span("x")], None)


def test_ids_match_tokens_in_prompt_and_completion_and_never_padding():
    rows = RowPositions.of_tokens([[5, 6, 7, 5], [6, 0]], [3, 1])
    assert where.ids(5, 0).resolve(rows).tolist() == [[True, False, False, True], [False, False, False, True]]
    with pytest.raises(PlanError, match="does not know them"):
        where.ids(5).resolve(RowPositions.of_rows([2], [1]))


@pytest.mark.parametrize("wrong", [(), (-1,), (1.5,), (True,)])
def test_ids_takes_token_ids(wrong, unchecked_types):
    with pytest.raises(PlanError, match="token ids"):
        where.ids(*wrong)


@pytest.mark.parametrize(
    "made",
    [
        where.ids(3, 4),
        where.span("France", occurrence=-1, missing="skip"),
        where.mask(torch.tensor([[True, False], [False, True]])),
        where.span("a") & ~where.ids(1) | where.mask([True]),
    ],
    ids=str,
)
def test_round_trip_through_json(made):
    assert from_json(made.to_json()) == made
    v = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
    plan = sl.Plan(sl.add(v, coef=1.0, where=made))
    assert sl.Plan.from_json(plan.to_json()) == plan
