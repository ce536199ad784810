import json

import pytest

from steerlab.core.errors import DataError
from steerlab.protocols import ChoiceItems
from tests.protocols.data import ITEMS, records


def test_a_question_is_asked_as_text_and_in_a_chat():
    item = ITEMS.items[0]
    assert item.prompt(chat=False).endswith(" (B) No\n\nAnswer: (")
    assert item.prompt(chat=False, before="Please. ", system="Be kind.").startswith("Be kind.\n\nPlease. Does the cat")
    assert item.prompt(chat=True, system="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": item.question},
        {"role": "assistant", "content": "("},
    ]
    assert item.prompt("B", chat=True)[-1] == {"role": "assistant", "content": "(B"}


def test_pairs_and_targets_differ_in_the_letter_alone():
    pairs, targets = ITEMS.pairs(chat=False), ITEMS.targets(chat=False)
    for item, positive, negative, target in zip(ITEMS, pairs.positives, pairs.negatives, targets, strict=True):
        assert positive == target.prompt + item.matching
        assert negative == target.prompt + item.other
        assert (target.positives, target.negatives) == ((item.matching,), (item.other,))
    assert [item.matching for item in ITEMS][:3] == ["A", "B", "A"]


def test_files_are_read_as_published(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in records()))
    assert ChoiceItems.from_jsonl(path).hash == ITEMS.hash


def test_a_split_is_of_questions_and_repeats():
    twice = ChoiceItems.from_records(records() * 2)
    parts = twice.split([0.5, 0.25, 0.25], seed=3)
    assert [len(part) for part in parts] == [12, 6, 6]
    asked = [{item.question for item in part} for part in parts]
    assert sum(map(len, asked)) == len(set.union(*asked)) == 12
    assert [part.hash for part in twice.split([0.5, 0.25, 0.25], seed=3)] == [part.hash for part in parts]
    with pytest.raises(DataError, match="too few"):
        ChoiceItems.from_records(records(2)).split([0.4, 0.1, 0.5], seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer_matching_behavior": " Yes"}, "is a letter such as"),
        ({"answer_matching_behavior": " (B)"}, "both answers are 'B'"),
        ({"question": 3}, "'question' is text, got 3"),
    ],
)
def test_bad_rows_are_refused(change, message):
    with pytest.raises(DataError, match=message):
        ChoiceItems.from_records([{**records(1)[0], **change}])
