import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from steerlab.core import shipped
from steerlab.core.errors import DataError
from steerlab.core.targets import Targets

VECTORS = shipped.shipped_vectors()
NAMES = ["sentiment", "formality", "refusal", "capitals"]
every_set = pytest.mark.parametrize("name", NAMES)

Row = dict[str, Any]


def read_rows(name: str, file: str) -> list[Row]:
    return [json.loads(line) for line in (VECTORS / name / file).read_text(encoding="utf-8").splitlines()]


PAIRS = {name: read_rows(name, "pairs.jsonl") for name in NAMES}
TARGETS = {name: read_rows(name, "targets.jsonl") for name in NAMES}


def plain(prompt: str | list[dict[str, str]]) -> str:
    """The words of a prompt; the turns of a chat on lines of their own."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def runs_of_four(text: str) -> set[tuple[str, ...]]:
    found = re.findall(r"[a-z]+", text.lower())
    return {tuple(found[i : i + 4]) for i in range(len(found) - 3)}


def sides(rows: list[Row]) -> list[str]:
    return [plain(row[side]) for row in rows for side in ("positive", "negative")]


def paragraphs(text: str) -> list[str]:
    return text.strip().split("\n\n")


def by_split(rows: list[Row], key: str) -> dict[str, set[str]]:
    found = defaultdict(set)
    for row in rows:
        found[row["split"]].add(plain(row[key]))
    return found


def targets_in(rows: list[Row]) -> set[str]:
    return {row["target"].strip().lower() for row in rows}


def occurring(phrases: set[str], text: str) -> set[str]:
    found = f" {' '.join(re.findall(r'[a-z]+', text.lower()))} "
    return {phrase for phrase in phrases if f" {phrase} " in found}


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


def test_neutral_text_has_no_target_word_of_sentiment():
    assert not occurring(targets_in(TARGETS["sentiment"]), shipped.neutral_text())


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


def test_the_sets_are_the_folders():
    assert {path.name for path in VECTORS.iterdir() if (path / "pairs.jsonl").is_file()} == set(NAMES)


@every_set
def test_pairs_are_enough_and_complete(name: str):
    assert all(set(row) == {"positive", "negative", "group", "split"} for row in PAIRS[name])
    sizes = {split: sum(row["split"] == split for row in PAIRS[name]) for split in ("train", "dev")}
    assert sum(sizes.values()) == len(PAIRS[name])
    assert sizes["train"] >= 54
    assert sizes["dev"] >= 12
    assert len(by_split(PAIRS[name], "group")["train"]) >= 8


@every_set
def test_groups_have_even_size_so_that_balanced_flips_are_exact(name: str):
    names = [row["group"] for row in PAIRS[name]]
    assert all(names.count(group) % 2 == 0 for group in names)


@every_set
def test_no_text_occurs_twice(name: str):
    texts = sides(PAIRS[name])
    assert len(set(texts)) == len(texts)


@every_set
def test_lengths_are_balanced_between_the_sides(name: str):
    n_positive, n_negative = (
        sum(len(plain(row[side]).split()) for row in PAIRS[name]) for side in ("positive", "negative")
    )
    # Formal English takes more words to say the same.
    tolerance = 0.1 if name == "formality" else 0.02
    assert abs(n_positive - n_negative) <= tolerance * n_positive


@every_set
def test_sides_of_a_pair_differ_little_in_length(name: str):
    difference = [abs(len(plain(row["positive"]).split()) - len(plain(row["negative"]).split())) for row in PAIRS[name]]
    assert max(difference) <= (3 if name == "formality" else 2)


@pytest.mark.parametrize("row", PAIRS["sentiment"], ids=lambda row: row["positive"][:30])
def test_sentiment_pairs_are_minimal(row: Row):
    positive, negative = row["positive"].split(), row["negative"].split()
    shared = set(positive) & set(negative)
    assert len(shared) >= len(set(positive)) / 2
    stops = {side[-1] if side[-1] in ".!" else "" for side in (row["positive"], row["negative"])}
    assert len(stops) == 1


def test_sides_of_a_refusal_pair_answer_one_request():
    for row in PAIRS["refusal"]:
        assert [m["role"] for m in row["positive"]] == [m["role"] for m in row["negative"]] == ["user", "assistant"]
        assert row["positive"][0] == row["negative"][0]
        assert row["positive"][1] != row["negative"][1]


def test_sides_of_a_capitals_pair_speak_of_one_country():
    for row in PAIRS["capitals"]:
        assert row["group"] in words(row["positive"]) & words(row["negative"])


# --- targets ------------------------------------------------------------------------------------------------------


@every_set
def test_targets_are_enough_and_complete(name: str):
    assert all(set(row) == {"prompt", "target", "label", "group", "split"} for row in TARGETS[name])
    assert {row["label"] for row in TARGETS[name]} == {1, -1}
    prompts = by_split(TARGETS[name], "prompt")
    assert set(prompts) == {"dev", "test"}
    assert len(prompts["dev"]) >= 12
    assert len(prompts["test"]) >= 24
    assert len(by_split(TARGETS[name], "group")["test"]) >= 9


@every_set
def test_target_prompts_and_groups_do_not_span_splits(name: str):
    for key in ("prompt", "group"):
        values = by_split(TARGETS[name], key)
        assert not values["dev"] & values["test"]


@every_set
def test_target_groups_are_not_groups_of_pairs(name: str):
    assert not {row["group"] for row in TARGETS[name]} & {row["group"] for row in PAIRS[name]}


@every_set
def test_no_target_row_occurs_twice(name: str):
    rows = [(plain(row["prompt"]), row["target"]) for row in TARGETS[name]]
    assert len(set(rows)) == len(rows)


@every_set
def test_each_prompt_has_its_targets(name: str):
    sizes = {(1, 1), (1, 2)} if name == "capitals" else {(3, 3)}
    for split in ("dev", "test"):
        for item in Targets.from_jsonl(VECTORS / name / "targets.jsonl", split=split):
            assert (len(item.positives), len(item.negatives)) in sizes


@every_set
def test_no_target_speaks_for_both_sides(name: str):
    found = {label: {row["target"] for row in TARGETS[name] if row["label"] == label} for label in (1, -1)}
    assert not found[1] & found[-1]


@every_set
def test_targets_join_their_prompts(name: str):
    # A reply in a chat starts after a line break; elsewhere the space belongs to the target.
    shape = r"[A-Z][a-z]+" if name == "refusal" else r"( [A-Z]?[a-z]+)+"
    assert all(re.fullmatch(shape, row["target"]) for row in TARGETS[name])
    assert all(not plain(row["prompt"]).endswith(" ") for row in TARGETS[name])


@every_set
def test_targets_occur_in_no_pair_and_no_prompt(name: str):
    found = targets_in(TARGETS[name])
    assert not occurring(found, "\n".join(sides(PAIRS[name])))
    assert not occurring(found, "\n".join(plain(row["prompt"]) for row in TARGETS[name]))


@pytest.mark.parametrize("name", ["formality", "refusal", "capitals"])
def test_targets_of_test_are_not_those_of_dev(name: str):
    by_part = {split: targets_in([r for r in TARGETS[name] if r["split"] == split]) for split in ("dev", "test")}
    assert not by_part["dev"] & by_part["test"]


@every_set
def test_prompts_share_no_four_words_in_a_row_with_the_training_pairs(name: str):
    train = set().union(*map(runs_of_four, sides([row for row in PAIRS[name] if row["split"] == "train"])))
    assert not [row["prompt"] for row in TARGETS[name] if runs_of_four(plain(row["prompt"])) & train]


def test_countries_of_the_targets_are_in_no_pair():
    countries = {row["group"].split()[-1] for row in TARGETS["capitals"]}
    assert len(countries) == 20
    assert not countries & words(" ".join(sides(PAIRS["capitals"])))


def test_a_country_has_one_capital():
    capitals = defaultdict(set)
    for row in TARGETS["capitals"]:
        if row["label"] == 1:
            capitals[row["group"]].add(row["target"])
    assert all(len(names) == 1 for names in capitals.values())
    assert len(set().union(*capitals.values())) == len(capitals)


# --- cards --------------------------------------------------------------------------------------------------------


def figures_of(path: Path) -> str:
    found = re.findall(
        r"<!-- figures: .*? -->\n(.*?)<!-- end of figures -->", path.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(found) == 1
    return found[0]


@every_set
def test_a_card_has_its_parts_and_measured_figures(name: str):
    path = VECTORS / name / "CARD.md"
    headings = re.findall(r"^## (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["Figures", "Data", "How it was chosen", "Use and limits"]
    rows = re.findall(
        r"^\| (every position|last prompt token and generated) \| (-?\d+\.\d\d) \|", figures_of(path), re.M
    )
    assert [place for place, _ in rows] == ["every position", "last prompt token and generated"]


@every_set
def test_the_list_states_the_slope_of_the_card(name: str):
    row = re.search(rf"^\| \[{name}\]\({name}/CARD\.md\) \| Apache-2\.0 \|.*$", figures_of(VECTORS / "README.md"), re.M)
    card = re.search(
        r"^\| every position \| (\S+) \| (.*?) \| .*? \| (.*?) \|", figures_of(VECTORS / name / "CARD.md"), re.M
    )
    assert row is not None
    assert card is not None
    slope, interval, rank = card.groups()
    assert row[0].endswith(f"| {slope} ({interval}) | {rank} |")


@every_set
def test_perplexity_stays_within_bounds_where_the_slope_is_fitted(name: str):
    doses, _, ratios = re.findall(r"^\|.*\|$", figures_of(VECTORS / name / "CARD.md"), re.M)[-3:]
    costs = {float(d): float(r) for d, r in zip(*(line.split("|")[2:-1] for line in (doses, ratios)), strict=True)}
    assert all(costs[dose] <= 1.5 for dose in (-0.2, -0.1, 0.1, 0.2))


# --- prompts of the samples ---------------------------------------------------------------------------------------


def test_sample_prompts_are_open_and_distinct():
    prompts = (VECTORS / "sentiment" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    assert len(prompts) == len(set(prompts)) == 6
    assert all(prompt and prompt == prompt.strip() and prompt[-1] not in ".!?" for prompt in prompts)


@every_set
def test_pairs_and_targets_are_there_by_name(name):
    assert len(shipped.pairs(name)) == len(PAIRS[name])
    assert len(shipped.pairs(name, "train")) + len(shipped.pairs(name, "dev")) == len(PAIRS[name])
    assert sum(len(item.targets) for item in shipped.targets(name)) == len(TARGETS[name])
    assert set(shipped.pairs(name, "train").groups).isdisjoint(shipped.pairs(name, "dev").groups)


def test_an_unknown_vector_names_those_that_are_there():
    with pytest.raises(DataError, match="capitals, formality, refusal, sentiment"):
        shipped.pairs("happiness")
