import json
import re

import pytest

from steerlab.core.errors import BackendMissingError, DataError
from steerlab.sequences import register_dataset, registered_datasets, tag_reward
from steerlab.sequences._arithmetic import arithmetic_problems
from steerlab.sequences.datasets import load_examples, sample_examples


def solve(text):
    """The answer, worked out from the numbers in the text by the kind of problem."""
    n = [int(found) for found in re.findall(r"\d+", text)]
    if "finds" in text:
        return n[0] + n[1] - n[2]
    if "boxes" in text:
        return n[0] * n[1] + n[2]
    if "shares" in text:
        assert (n[1] - n[0]) % n[2] == 0
        return (n[1] - n[0]) // n[2]
    if "rent" in text:
        return n[0] * n[1] * n[2] - n[3]
    if "bus" in text:
        return n[0] * n[1] + n[2]
    assert "years old" in text
    return n[0] * n[1] + n[2]


@pytest.mark.parametrize(("split", "size"), [("train", 4096), ("validation", 512), ("test", 512)])
def test_answers_are_right(split, size):
    rows = arithmetic_problems(split)
    assert len(rows) == size
    assert all(solve(row["question"]) == int(row["answer"]) for row in rows)
    assert rows == arithmetic_problems(split)


def test_no_problem_is_in_two_splits():
    texts = [row["question"] for split in ("train", "validation", "test") for row in arithmetic_problems(split)]
    assert len(texts) == len(set(texts))


def test_templates():
    plain, r1 = load_examples("arithmetic", "test")[0], load_examples("arithmetic_r1", "test")[0]
    assert plain["question"] in plain["prompt"]
    assert r1["prompt"].endswith("<think>")
    assert plain["answer"] == r1["answer"]
    assert tag_reward(r1["prompt"], f" so </think> <answer>{r1['answer']}</answer>", r1) == 1.0
    assert {"arithmetic", "arithmetic_r1", "gsm8k_r1_template"} <= set(registered_datasets())


def test_sampling():
    first = sample_examples("arithmetic", "train", 50, 0)
    assert first == sample_examples("arithmetic", "train", 50, 0)
    assert first != sample_examples("arithmetic", "train", 50, 1)
    assert len({row["prompt"] for row in first}) == 50  # without replacement
    assert sample_examples("arithmetic", "train", 20, 0) == first[:20]
    assert len(sample_examples("arithmetic", "test", 9999, 0, at_most=True)) == 512
    with pytest.raises(DataError, match="has 512 rows in split 'test', fewer than the 600"):
        sample_examples("arithmetic", "test", 600, 0)
    with pytest.raises(DataError, match="num_prompts is an integer ≥ 1, got 0"):
        sample_examples("arithmetic", "test", 0, 0)
    with pytest.raises(DataError, match="has no split 'dev'"):
        sample_examples("arithmetic", "dev", 1, 0)


def test_registered_functions():
    register_dataset("two", lambda split: [{"problem": f"{split} 1", "solution": 4}, {"question": "2"}])
    assert load_examples("two", "x") == [
        {"problem": "x 1", "solution": 4, "prompt": "x 1", "answer": 4},
        {"question": "2", "prompt": "2"},
    ]
    register_dataset("two", lambda split: [])
    with pytest.raises(DataError, match="has no rows"):
        load_examples("two", "train")
    register_dataset("two", lambda split: [{"answer": 3}])
    with pytest.raises(DataError, match=r"row 0 of two \(train\) has no 'prompt'"):
        load_examples("two", "train")
    with pytest.raises(DataError, match="takes a function"):
        register_dataset("two", [1])


def test_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a", "answer": "1"}, {"question": "b", "split": "test"}, {"prompt": "c", "split": "train"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [row["prompt"] for row in load_examples(str(path), "train")] == ["a", "c"]
    assert [row["prompt"] for row in load_examples(str(path), "test")] == ["a", "b"]
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: 'prompt' is empty"):
        load_examples(str(path), "train")
    with pytest.raises(DataError, match="Cannot read"):
        load_examples("nowhere.jsonl", "train")


def test_names_that_only_the_library_knows(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendMissingError, match="Registered are arithmetic, arithmetic_r1"):
        load_examples("no/such-set", "train")


def test_the_library_is_used(monkeypatch):
    import sys
    import types

    calls = []

    def load_dataset(path, split, **options):
        calls.append((path, split, options))
        if path == "broken/set":
            raise FileNotFoundError("no such set")
        return [{"question": "Two and two?", "answer": "They make four.\n#### 4"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, __spec__=object()))
    assert load_examples("some/set", "test")[0]["prompt"] == "Two and two?"
    row = load_examples("gsm8k_r1_template", "train")[0]
    assert row["answer"] == "4"
    assert "Two and two?" in row["prompt"]
    assert calls == [("some/set", "test", {}), ("openai/gsm8k", "train", {"name": "main"})]
    with pytest.raises(DataError, match="cannot load 'broken/set', split 'train': no such set"):
        load_examples("broken/set", "train")
