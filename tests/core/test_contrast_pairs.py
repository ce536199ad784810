import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core._warning import SteerlabWarning
from steerlab.core.contrast_pairs import ContrastPairs, balanced_flips
from steerlab.core.errors import DataError
from steerlab.core.targets import Targets


def pairs(n, groups=None):
    return ContrastPairs.from_lists([f"good {i}" for i in range(n)], [f"bad {i}" for i in range(n)], groups)


def write(tmp_path, rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_from_jsonl(tmp_path):
    path = write(
        tmp_path,
        [
            {"positive": "a", "negative": "b", "frame": "x", "split": "train"},
            {"positive": "c", "negative": "d", "frame": 0, "split": "train"},
            {"positive": "e", "negative": "f", "frame": "x", "split": "test"},
        ],
    )
    loaded = ContrastPairs.from_jsonl(path, group="frame", split="train")
    assert list(loaded) == [("a", "b"), ("c", "d")]
    assert loaded.groups == ("x", "0")
    assert len(ContrastPairs.from_jsonl(path)) == 3


def test_from_jsonl_takes_chats_and_ids(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, [{"positive": chat, "negative": [1, 2]}])
    assert list(ContrastPairs.from_jsonl(path)) == [(chat, [1, 2])]


@pytest.mark.parametrize(
    "bad",
    [
        {"positive": "c", "g": "x"},
        {"positive": "", "negative": "d", "g": "x"},
        {"positive": "c", "negative": None, "g": "x"},
        {"positive": 5, "negative": "d", "g": "x"},
        {"positive": "c", "negative": {"text": "d"}, "g": "x"},
        {"positive": ["c"], "negative": "d", "g": "x"},
        {"positive": "c", "negative": "d", "g": None},
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, bad):
    good = {"positive": "a", "negative": "b", "g": "x"}
    with pytest.raises(DataError, match=r"pairs\.jsonl:2"):
        ContrastPairs.from_jsonl(write(tmp_path, [good, bad]), group="g")


def test_an_empty_selection_is_refused(tmp_path):
    path = write(tmp_path, [{"positive": "a", "negative": "b"}])
    with pytest.raises(DataError, match="split 'test'"):
        ContrastPairs.from_jsonl(path, split="test")


def test_lists_must_match():
    with pytest.raises(DataError, match="2 positives and 1 negatives"):
        ContrastPairs.from_lists(["a", "b"], ["c"])
    with pytest.raises(DataError, match="no contrast pairs"):
        ContrastPairs.from_lists([], [])
    with pytest.raises(DataError, match=r"got 2, 0 and 0\. Lists become pairs with ContrastPairs\.from_lists"):
        ContrastPairs(("a", "b"))
    with pytest.raises(DataError, match="Pair 1"):
        ContrastPairs.from_lists(["a", "b"], ["c", ""])


def test_hash_follows_content_and_order():
    assert pairs(3).hash == pairs(3).hash
    assert pairs(3).hash != pairs(3).take([1, 0, 2]).hash
    assert pairs(3).hash != pairs(3, ["a", "a", "b"]).hash
    assert pairs(2).flipped([True, False]).hash != pairs(2).hash


def test_flipped_exchanges_the_marked_pairs():
    assert list(pairs(2).flipped([True, False])) == [("bad 0", "good 0"), ("good 1", "bad 1")]
    with pytest.raises(DataError, match="2 pairs and 1 flips"):
        pairs(2).flipped([True])


@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.integers(0, 5))
def test_a_split_keeps_groups_whole_and_loses_nothing(groups, seed):
    whole = pairs(len(groups), [str(g) for g in groups])
    try:
        left, right = whole.split(0.6, seed=seed)
    except DataError:
        return
    assert not set(left.groups) & set(right.groups)
    assert sorted([*left, *right]) == sorted(whole)


def test_split_is_close_to_the_fraction_and_repeats():
    whole = pairs(40, [str(i // 4) for i in range(40)])
    left, right = whole.split(0.8, seed=3)
    assert (len(left), len(right)) == (32, 8)
    assert whole.split(0.8, seed=3)[0] == left
    assert any(whole.split(0.8, seed=s)[0] != left for s in range(5))


def test_one_group_cannot_be_split():
    with pytest.raises(DataError, match="one side would be empty"):
        pairs(4, ["a"] * 4).split()
    with pytest.raises(DataError, match="fraction"):
        pairs(4).split(1.0)


def test_a_text_on_both_sides_of_a_split_is_a_leak():
    leaky = ContrastPairs.from_lists(["same", "same"], ["b", "d"])
    with pytest.raises(DataError, match="'same'"):
        leaky.split(0.5)
    crossed = ContrastPairs.from_lists(["same", "c"], ["b", "same"])
    with pytest.raises(DataError, match="'same'"):
        crossed.split(0.5)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(0, 100))
def test_balanced_flips_flip_half_of_every_group(groups, seed):
    flips = np.array(balanced_flips(groups, np.random.default_rng(seed)))
    for name in set(groups):
        inside = flips[np.array(groups) == name]
        assert inside.sum() in {len(inside) // 2, (len(inside) + 1) // 2}


def test_balanced_flips_reach_every_pair_and_both_sides_of_an_odd_one():
    draws = np.array([balanced_flips(list("aaab"), np.random.default_rng(s)) for s in range(200)])
    assert draws.any(axis=0).all()
    assert (~draws).any(axis=0).all()


@pytest.mark.parametrize("groups", ["abcdefgh", "aaabbb", "aabbcd", "ab"])
def test_flips_balance_over_all_pairs_when_groups_cannot(groups):
    for seed in range(20):
        flips = balanced_flips(list(groups), np.random.default_rng(seed))
        assert sum(flips) == len(groups) // 2
        for name in set(groups):
            inside = [flip for flip, group in zip(flips, groups, strict=True) if group == name]
            assert abs(2 * sum(inside) - len(inside)) <= 1


def test_one_string_is_not_a_list_of_prompts():
    with pytest.raises(DataError, match="two lists"):
        ContrastPairs.from_lists("abc", "abd")


# --- CSV, frames, and wrong types ---------------------------------------------------------------------------------


def test_from_csv(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text('good,bad,g,split\n"I, too",no,x,train\nyes,"no\nno",y,train\nmaybe,never,x,test\n')
    loaded = ContrastPairs.from_csv(path, positive="good", negative="bad", group="g", split="train")
    assert list(loaded) == [("I, too", "no"), ("yes", "no\nno")]
    assert loaded.groups == ("x", "y")


@pytest.mark.parametrize(
    ("row", "place"),
    [("c,,x", r"pairs\.csv:4: 'negative' is empty"), ("c,d,", r"pairs\.csv:4: 'g' is empty"), ("c,d", r"pairs\.csv:4")],
)
def test_a_bad_csv_row_is_named_by_its_line(tmp_path, row, place):
    path = tmp_path / "pairs.csv"
    path.write_text(f'positive,negative,g\n"a\na",b,x\n{row}\n')
    with pytest.raises(DataError, match=place):
        ContrastPairs.from_csv(path, group="g")


def test_a_chat_written_into_a_csv_cell_is_text(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text('positive,negative\n"[1, 2]",b\n')
    assert list(ContrastPairs.from_csv(path)) == [("[1, 2]", "b")]


def test_frames_round_trip():
    chat = [{"role": "user", "content": "hi"}]
    original = ContrastPairs.from_lists(["a", chat, [1, 2]], ["b", "c", [3]], ["x", "y", "x"])
    frame = original.to_frame()
    assert list(frame.columns) == ["positive", "negative", "group"]
    assert list(frame.index) == [0, 1, 2]
    assert ContrastPairs.from_frame(frame, group="group").hash == original.hash


def test_a_frame_that_was_filtered_is_read_by_position():
    frame = pd.DataFrame({"positive": ["a", "b", None], "negative": ["c", "d", "e"], "split": ["x", "y", "y"]})
    assert list(ContrastPairs.from_frame(frame, split="x")) == [("a", "c")]
    with pytest.raises(DataError, match="row 2: 'positive' is empty"):
        ContrastPairs.from_frame(frame)
    with pytest.raises(DataError, match="row 1: 'positive' is empty"):
        ContrastPairs.from_frame(frame[1:])
    with pytest.raises(DataError, match="split 'z'"):
        ContrastPairs.from_frame(frame, split="z")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContrastPairs.from_lists(3, ["b"]),
        lambda: ContrastPairs.from_lists(["a"], None),
        lambda: ContrastPairs.from_lists([3], ["b"]),
        lambda: ContrastPairs.from_lists([None], ["b"]),
        lambda: ContrastPairs.from_lists([["a"]], ["b"]),
        lambda: ContrastPairs.from_lists(["a"], [1.5]),
        lambda: ContrastPairs.from_lists(["a"], ["b"], 3),
        lambda: ContrastPairs.from_lists(["a"], ["b"], "x"),
        lambda: ContrastPairs.from_lists(["a", "c"], ["b", "d"], {"x", "y"}),
        lambda: ContrastPairs.from_frame("pairs.csv"),
        lambda: ContrastPairs.from_jsonl(3),
        lambda: ContrastPairs.from_csv(None),
        lambda: ContrastPairs.from_lists(["a", "c"], ["b", "d"]).split("half"),
    ],
)
def test_wrong_types_are_data_errors(make):
    with pytest.raises(DataError):
        make()


def test_a_text_on_the_other_side_of_another_group_is_a_leak():
    crossed = ContrastPairs.from_lists(["a", "b", "c", "d"], ["b", "e", "f", "g"], ["1", "2", "3", "4"])
    results = []
    for seed in range(20):
        try:
            left, right = crossed.split(0.5, seed=seed)
            results.append({*left.groups} >= {"1", "2"} or {*right.groups} >= {"1", "2"})
        except DataError as error:
            results.append(None)
            found = str(error)
    assert None in results
    assert True in results
    assert False not in results
    assert "'b'" in found


def test_one_pretty_printed_array_is_read_as_lines_are(tmp_path):
    rows = [{"positive": f"good {k}", "negative": f"bad {k}", "split": "train" if k else "dev"} for k in range(3)]
    lines, array = tmp_path / "pairs.jsonl", tmp_path / "pairs.json"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    array.write_text(json.dumps(rows, indent=2))
    assert ContrastPairs.from_jsonl(array, split="train") == ContrastPairs.from_jsonl(lines, split="train")
    targets = [{"prompt": "a", "target": word, "label": label} for word, label in ((" b", 1), (" c", -1))]
    array.write_text(json.dumps(targets, indent=2))
    assert Targets.from_jsonl(array) == Targets.from_records(targets)


def test_flips_that_are_no_truth_values_are_refused():
    pairs = ContrastPairs.from_lists(["a", "b"], ["c", "d"])
    assert pairs.flipped([1, 0]).positives == ("c", "b")
    for wrong in ([-1, 1], "tf", [math.nan, True]):
        with pytest.raises(DataError, match="True or False per pair"):
            pairs.flipped(wrong)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_missing_group_is_named(missing):
    with pytest.raises(DataError, match="Pair 1: the name of the group is missing"):
        ContrastPairs.from_lists(["a", "b"], ["c", "d"], ["g", missing])


def test_a_row_that_is_not_there_is_named():
    with pytest.raises(DataError, match="There are 2 rows, 0 to 1; row 5"):
        ContrastPairs.from_lists(["a", "b"], ["c", "d"]).take([0, 5])


def test_a_pair_of_one_text_gives_a_warning():
    with pytest.warns(SteerlabWarning, match="1 pair of 2 .* pair 1, 'same'"):
        ContrastPairs.from_lists(["a", "same"], ["b", "same"])
