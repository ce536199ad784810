import json

import pytest

from steerlab.core.errors import DataError
from steerlab.core.targets import Targets


def row(prompt, target, label, **more):
    return {"prompt": prompt, "target": target, "label": label, **more}


def test_rows_of_one_prompt_form_one_item():
    targets = Targets.from_records([row("p", " a", 1), row("q", " c", 1), row("p", " b", -1), row("q", [5, 6], -1)])
    assert targets.prompts == ["p", "q"]
    assert [item.targets for item in targets] == [[" a", " b"], [" c", [5, 6]]]
    assert targets.groups == ["p", "q"]


def test_groups_are_kept_and_zero_is_a_group():
    rows = [row(p, t, label, group=0) for p in "pq" for t, label in ((" a", 1), (" b", -1))]
    assert Targets.from_records(rows).groups == ["0", "0"]


def test_chat_prompts_and_ids():
    chat = [{"role": "user", "content": "hi"}]
    targets = Targets.from_records(
        [row(chat, " a", 1), row(chat, " b", -1), row([1, 2], " a", 1), row([1, 2], "b", -1)]
    )
    assert targets.prompts == [chat, [1, 2]]


@pytest.mark.parametrize("label", [0, 2, "1", True, None, 0.5, [1]])
def test_other_labels_are_refused_with_their_place(label):
    with pytest.raises(DataError, match="record 1"):
        Targets.from_records([row("p", " a", 1), row("p", " b", label)])


@pytest.mark.parametrize("target", ["", None, 5, {"text": "a"}, ["a"], [1.5]])
def test_a_bad_target_is_named_by_its_line(tmp_path, target):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row("p", " a", 1)) + "\n\n" + json.dumps(row("p", target, -1)))
    with pytest.raises(DataError, match=r"t\.jsonl:3"):
        Targets.from_jsonl(path)


@pytest.mark.parametrize("prompt", ["", None, 5, {"text": "a"}, ["a"]])
def test_a_bad_prompt_is_named_by_its_place(prompt):
    with pytest.raises(DataError, match="record 0"):
        Targets.from_records([row(prompt, " a", 1)])


def test_each_item_needs_both_sides():
    with pytest.raises(DataError, match="negative"):
        Targets.from_records([row("p", " a", 1)])
    with pytest.raises(DataError, match="positive"):
        Targets.from_records([row("p", " a", -1)])
    with pytest.raises(DataError, match="no targets"):
        Targets.from_records([])


def test_split_and_hash(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [row(p, t, label, split=s) for p, s in (("p", "dev"), ("q", "test")) for t, label in ((" a", 1), (" b", -1))]
    path.write_text("\n".join(map(json.dumps, rows)))
    dev, both = Targets.from_jsonl(path, split="dev"), Targets.from_jsonl(path)
    assert dev.prompts == ["p"]
    assert dev.hash == both.take([0]).hash != both.hash
    with pytest.raises(DataError, match="split 'nope'"):
        Targets.from_jsonl(path, split="nope")
