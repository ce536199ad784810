import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from steerlab.core import shipped
from steerlab.core.errors import DataError
from steerlab.core.pairs import ContrastPairs
from steerlab.core.targets import Targets

SENTIMENT = shipped.shipped_vectors() / "sentiment"
PAIRS = [json.loads(line) for line in (SENTIMENT / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
TARGETS = [json.loads(line) for line in (SENTIMENT / "targets.jsonl").read_text(encoding="utf-8").splitlines()]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def paragraphs(text: str) -> list[str]:
    return text.strip().split("\n\n")


def by_split(rows: list[dict], key: str) -> dict[str, set[str]]:
    found = defaultdict(set)
    for row in rows:
        found[row["split"]].add(row[key])
    return found


# --- texts --------------------------------------------------------------------------------------------------------


def test_reference_text_is_the_pinned_one():
    assert hashlib.sha256(shipped.reference_text().encode()).hexdigest() == shipped.REFERENCE_SHA256


def test_texts_are_prose_in_paragraphs():
    assert 500 <= len(shipped.reference_text().split()) <= 800
    assert 400 <= len(shipped.neutral_text().split()) <= 600
    for text in (shipped.reference_text(), shipped.neutral_text()):
        assert text.endswith("\n")
        assert 6 <= len(paragraphs(text)) <= 12
        assert all(part == part.strip() and "\n" not in part for part in paragraphs(text))


def test_texts_are_disjoint():
    assert not set(paragraphs(shipped.reference_text())) & set(paragraphs(shipped.neutral_text()))


def test_neutral_text_has_no_target_word():
    assert not words(shipped.neutral_text()) & {row["target"].strip() for row in TARGETS}


def test_missing_text_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "_HERE", tmp_path)
    with pytest.raises(DataError, match=r"reference\.txt.*Reinstall"):
        shipped.reference_text()


# --- folder -------------------------------------------------------------------------------------------------------


def make_vectors(folder: Path) -> Path:
    (folder / "sentiment").mkdir(parents=True)
    (folder / "sentiment" / "pairs.jsonl").touch()
    return folder


def test_vectors_folder_of_a_wheel_comes_first(tmp_path, monkeypatch):
    package = tmp_path / "steerlab"
    monkeypatch.setattr(shipped, "_PACKAGE", package)
    beside = make_vectors(tmp_path / "vectors")
    assert shipped.shipped_vectors() == beside
    inside = make_vectors(package / "_vectors")
    assert shipped.shipped_vectors() == inside


def test_missing_vectors_folder_names_the_places(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "steerlab")
    (tmp_path / "vectors").mkdir()
    with pytest.raises(DataError, match=r"_vectors and .*vectors"):
        shipped.shipped_vectors()


# --- contrast pairs -----------------------------------------------------------------------------------------------


def test_pairs_are_enough_and_complete():
    assert all(set(row) == {"positive", "negative", "group", "split"} for row in PAIRS)
    sizes = {split: sum(row["split"] == split for row in PAIRS) for split in ("train", "dev")}
    assert sum(sizes.values()) == len(PAIRS)
    assert sizes["train"] >= 48
    assert sizes["dev"] >= 12
    assert len({row["group"] for row in PAIRS}) >= 8


def test_pair_groups_do_not_span_splits():
    groups = by_split(PAIRS, "group")
    assert not groups["train"] & groups["dev"]


def test_groups_have_even_size_so_that_balanced_flips_are_exact():
    names = [row["group"] for row in PAIRS]
    assert all(names.count(name) % 2 == 0 for name in names)


def test_no_text_occurs_twice():
    texts = [row[side] for row in PAIRS for side in ("positive", "negative")]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row["positive"][:30])
def test_pairs_are_minimal(row):
    positive, negative = row["positive"].split(), row["negative"].split()
    assert abs(len(positive) - len(negative)) <= 2
    shared = set(positive) & set(negative)
    assert len(shared) >= len(set(positive)) / 2
    stops = {side[-1] if side[-1] in ".!" else "" for side in (row["positive"], row["negative"])}
    assert len(stops) == 1


def test_lengths_are_balanced_between_the_sides():
    n_positive = sum(len(row["positive"].split()) for row in PAIRS)
    n_negative = sum(len(row["negative"].split()) for row in PAIRS)
    assert abs(n_positive - n_negative) <= 0.02 * n_positive


def test_pairs_load():
    train = ContrastPairs.from_jsonl(SENTIMENT / "pairs.jsonl", group="group", split="train")
    dev = ContrastPairs.from_jsonl(SENTIMENT / "pairs.jsonl", group="group", split="dev")
    assert len(train) + len(dev) == len(PAIRS)
    assert set(train.groups) == by_split(PAIRS, "group")["train"]


# --- targets ------------------------------------------------------------------------------------------------------


def test_targets_are_enough_and_complete():
    assert all(set(row) == {"prompt", "target", "label", "group", "split"} for row in TARGETS)
    assert {row["label"] for row in TARGETS} == {1, -1}
    prompts = by_split(TARGETS, "prompt")
    assert set(prompts) == {"dev", "test"}
    assert len(prompts["dev"]) >= 12
    assert len(prompts["test"]) >= 24


def test_target_prompts_and_groups_do_not_span_splits():
    for key in ("prompt", "group"):
        values = by_split(TARGETS, key)
        assert not values["dev"] & values["test"]


def test_target_groups_are_not_groups_of_pairs():
    assert not {row["group"] for row in TARGETS} & {row["group"] for row in PAIRS}


def test_no_target_row_occurs_twice():
    rows = [(row["prompt"], row["target"]) for row in TARGETS]
    assert len(set(rows)) == len(rows)


def test_each_prompt_has_three_targets_a_side():
    for split in ("dev", "test"):
        for item in Targets.from_jsonl(SENTIMENT / "targets.jsonl", split=split):
            assert (len(item.positives), len(item.negatives)) == (3, 3)


def test_targets_are_single_words_with_a_leading_space():
    assert all(re.fullmatch(r" [a-z]+", row["target"]) for row in TARGETS)
    assert all(not row["prompt"].endswith(" ") for row in TARGETS)
    sides = {label: {row["target"] for row in TARGETS if row["label"] == label} for label in (1, -1)}
    assert not sides[1] & sides[-1]


def test_target_words_occur_in_no_pair_and_no_prompt():
    targets = {row["target"].strip() for row in TARGETS}
    assert not targets & words(" ".join(row[side] for row in PAIRS for side in ("positive", "negative")))
    assert not targets & words(" ".join(row["prompt"] for row in TARGETS))


def test_prompts_share_no_four_words_in_a_row_with_the_training_pairs():
    def runs(text: str) -> set[tuple[str, ...]]:
        found = re.findall(r"[a-z]+", text.lower())
        return {tuple(found[i : i + 4]) for i in range(len(found) - 3)}

    train = set().union(*(runs(row[side]) for row in PAIRS for side in ("positive", "negative")))
    assert not [row["prompt"] for row in TARGETS if runs(row["prompt"]) & train]


# --- prompts of the samples ---------------------------------------------------------------------------------------


def test_sample_prompts_are_open_and_distinct():
    prompts = (SENTIMENT / "prompts.txt").read_text(encoding="utf-8").splitlines()
    assert len(prompts) == len(set(prompts)) == 6
    assert all(prompt and prompt == prompt.strip() and prompt[-1] not in ".!?" for prompt in prompts)
