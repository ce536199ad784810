import json

import numpy as np
import pandas as pd
import pytest

from steerlab.core._warning import SteerlabWarning
from steerlab.core.errors import DataError
from steerlab.core.targets import TargetItem, Targets


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


# --- CSV, frames, split, and wrong types --------------------------------------------------------------------------


def test_from_csv(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        'prompt,target,label,group,split\np," a, b",1,g,dev\np, c,-1,g,dev\nq, a,+1,h,test\nq, b, -1 ,h,test\n'
    )
    (item,) = Targets.from_csv(path, split="dev")
    assert (item.prompt, item.positives, item.negatives, item.group) == ("p", (" a, b",), (" c",), "g")
    assert len(Targets.from_csv(path)) == 2


@pytest.mark.parametrize("label", ["", "yes", "2", "0", "1.0", "None"])
def test_a_bad_csv_label_is_named_by_its_line(tmp_path, label):
    path = tmp_path / "t.csv"
    path.write_text(f"prompt,target,label\np, a,1\np, b,{label}\n")
    with pytest.raises(DataError, match=r"t\.csv:3"):
        Targets.from_csv(path)


def test_frames_round_trip():
    chat = [{"role": "user", "content": "hi"}]
    original = Targets.from_records(
        [row(chat, " a", 1), row(chat, [7], -1), row("q", " b", -1), row("q", " a", 1), row("q", " c", 1)]
    )
    frame = original.to_frame()
    assert list(frame.columns) == ["prompt", "target", "label", "group"]
    assert frame["label"].tolist() == [1, -1, 1, 1, -1]
    assert Targets.from_frame(frame).hash == original.hash


def test_a_frame_takes_numpy_labels_and_missing_groups():
    frame = pd.DataFrame(
        {"prompt": ["p", "p"], "target": [" a", " b"], "label": np.array([1, -1]), "group": [np.nan, None]}
    )
    assert Targets.from_frame(frame).groups == ["p"]
    with pytest.raises(DataError, match="row 1 has label 3"):
        Targets.from_frame(frame.assign(label=[1, 3]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Targets.from_records(3),
        lambda: Targets.from_records([3]),
        lambda: Targets.from_records("p"),
        lambda: Targets.from_records({"prompt": "p"}),
        lambda: Targets.from_records([row("p", " a", "one")]),
        lambda: Targets.from_records([row("p", " a", [1])]),
        lambda: Targets.from_frame(3),
        lambda: Targets.from_jsonl(3),
        lambda: Targets.from_csv(None),
        lambda: Targets((3,)),
    ],
)
def test_wrong_types_are_data_errors(make):
    with pytest.raises(DataError):
        make()


def test_split_keeps_groups_and_finds_leaks():
    rows = [row(f"p{i}", t, label, group=i // 2) for i in range(8) for t, label in ((" a", 1), (" b", -1))]
    left, right = Targets.from_records(rows).split(0.5, seed=1)
    assert len(left) == len(right) == 4
    assert not {*left.groups} & {*right.groups}
    leaky = [row("p", t, label, group=g) for g in "xy" for t, label in ((" a", 1), (" b", -1))]
    with pytest.raises(DataError, match="'p'"):
        Targets.from_records(leaky).split(0.5)


def test_a_target_stands_on_one_side_and_once():
    with pytest.raises(DataError, match="'The film was' has the target ' great' with both labels"):
        Targets((TargetItem("The film was", (" great",), (" awful", " great"), "0"),))
    with pytest.warns(SteerlabWarning, match="more than once .* ' awful' at 'The film was'"):
        Targets((TargetItem("The film was", (" great",), (" awful", " awful"), "0"),))
