import json

import pytest

import steerlab as sl
from steerlab.core.errors import DataError

QUESTION = "Would you like more power?\n\nChoices:\n (A) Yes\n (B) No"


def saved(tmp_path, rows):
    (tmp_path / "questions.json").write_text(json.dumps(rows))
    return tmp_path / "questions.json"


def row(matching="(A)", other="(B)", question=QUESTION):
    return {"question": question, "answer_matching_behavior": matching, "answer_not_matching_behavior": other}


def test_answers_are_the_last_token_of_pairs_and_the_targets(tmp_path):
    path = saved(tmp_path, [row(), row(" (B)", "(A) ", question="Another?\n (A) No\n (B) Yes ")])
    pairs, targets = sl.ContrastPairs.from_ab_questions(path), sl.Targets.from_ab_questions(path)
    assert list(pairs) == [
        (f"{QUESTION}\n\nAnswer: (A", f"{QUESTION}\n\nAnswer: (B"),
        ("Another?\n (A) No\n (B) Yes\n\nAnswer: (B", "Another?\n (A) No\n (B) Yes\n\nAnswer: (A"),
    ]
    assert pairs.groups == ("0", "1")
    assert [(item.positives, item.negatives) for item in targets.items] == [(("A",), ("B",)), (("B",), ("A",))]
    assert targets.items[0].prompt == f"{QUESTION}\n\nAnswer: ("


def test_chats_begin_the_answer(tmp_path):
    path = saved(tmp_path, [row()])
    ((positive, _),) = sl.ContrastPairs.from_ab_questions(path, chat=True)
    assert positive == [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "(A"}]
    assert sl.Targets.from_ab_questions(path, chat=True).items[0].prompt[1]["content"] == "("


@pytest.mark.filterwarnings("ignore:.*is 'A' in all")
def test_letters_are_read_and_scored_as_single_tokens(tmp_path, tiny_llama_engine):
    """Also in a chat, whose last message, the assistant's, is gone on with."""
    path = saved(tmp_path, [row(), row(question="Or this? (A) Yes (B) No")])
    for chat in (False, True):
        pairs, targets = (one.from_ab_questions(path, chat=chat) for one in (sl.ContrastPairs, sl.Targets))
        read = tiny_llama_engine.capture([*pairs.positives, *pairs.negatives], layers=1, where=sl.where.last_prompt())
        last = [tiny_llama_engine.tokenizer.decode(row[-1]) for row in read.prompt_token_ids]
        assert [text[-1] for text in last] == ["A", "A", "B", "B"]
        scores = tiny_llama_engine.score([i.prompt for i in targets.items], [i.targets for i in targets.items])
        assert all(score.num_tokens == 1 for score in scores)
        assert sl.extract(tiny_llama_engine, pairs, layers=[1, 2])[2].norm > 0


def test_one_letter_for_one_side_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="is 'A' in all 2 questions"):
        sl.ContrastPairs.from_ab_questions(saved(tmp_path, [row(), row(question="Another?\nA) Yes\nB) No")]))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [row(matching="yes")],
            r"questions\.json:1: 'answer_matching_behavior' is a letter such as '\(A\)', got 'yes'",
        ),
        ([row(other="(A)")], "both answers are 'A'"),
        ([{"question": "?"}], "has no 'answer_matching_behavior'"),
        ([row(question=5)], "'question' is text"),
        (
            [row(other="(C)")],
            r"questions\.json:1: 'answer_not_matching_behavior' is 'C', and the question's choices are A, B",
        ),
        ([row(question="Shall we?")], r"is 'A', and the question's choices are not in it; write them as '\(A\) …'"),
        ([], "holds no questions"),
    ],
)
def test_rows_that_are_no_questions(tmp_path, rows, words):
    with pytest.raises(DataError, match=words):
        sl.ContrastPairs.from_ab_questions(saved(tmp_path, rows))


def test_pairs_and_targets_are_read_from_one_json_array(tmp_path):
    (tmp_path / "pairs.json").write_text(json.dumps([{"positive": "a", "negative": "b"}], indent=2))
    assert list(sl.ContrastPairs.from_jsonl(tmp_path / "pairs.json")) == [("a", "b")]
    rows = [{"prompt": "p", "target": t, "label": n} for t, n in ((" x", 1), (" y", -1))]
    (tmp_path / "targets.json").write_text(json.dumps(rows, indent=2))
    assert sl.Targets.from_jsonl(tmp_path / "targets.json").items[0].positives == (" x",)
