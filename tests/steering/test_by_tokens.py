"""Positions that depend on a row's tokens: hand-worked cases, a plain loop as reference, and passes of any shape."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.steering.positions import where
from steerlab.steering.positions._by_tokens import by_tokens, check_vocabulary, spell, trail_of
from steerlab.steering.positions._rows import RowPositions

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)


def chosen(place, tokens, prompt_len=1):
    """The positions of a whole row that a set holds."""
    return place.resolve(RowPositions.of_tokens([tokens], [prompt_len]))[0].nonzero()[:, 0].tolist()


#       0  1  2  3  4  5  6  7  8  9
ROW = [9, 5, 1, 5, 2, 7, 6, 3, 5, 4]


@pytest.mark.parametrize(
    ("place", "positions"),
    [
        (where.between(5, 6), [2, 3, 4, 5, 9]),  # the start that comes again is inside; the last span stays open
        (where.between(5, 6, inclusive=True), [1, 2, 3, 4, 5, 6, 8, 9]),
        (where.between([5, 2], [6, 3]), [5, 6]),  # the end happens at 3; the 6 before it is still inside
        (where.between({1, 3}, {7, 4}), [3, 4, 8]),
        (where.between(8, 6), []),
        (where.after(5, 2), [2, 3, 4, 5, 9]),
        (where.after(5, 2) & where.generated(), [4, 5, 9]),
        (where.after([7, 6]), [7, 8, 9]),
        (where.after([7, 6], 1, inclusive=True), [6, 7]),
        (where.after({2, (6, 3)}, 0, inclusive=True), [4, 7]),
        (~where.after(9) | where.ids(4), [0, 9]),
    ],
)
def test_hand_worked_rows(place, positions):
    assert chosen(place, ROW, prompt_len=4) == positions


def reference(place, tokens):
    """The same token by token, as the docstrings say it."""
    found = []
    is_open, last = False, None
    for p in range(len(tokens)):

        def happens(event, p=p):
            return any(len(s) <= p + 1 and tuple(tokens[p + 1 - len(s) : p + 1]) == s for s in event)

        if place.kind == "between":
            was_open = is_open
            is_open = happens(place.start) or (is_open and not happens(place.end))
            found.append((was_open or is_open) if place.inclusive else (was_open and is_open))
        else:
            inside = last is not None and (place.n is None or p - last <= place.n)
            last = p if happens(place.event) else last
            found.append(inside or (place.inclusive and last == p))
    return found


SETS = [
    where.between([0, 1], 2),
    where.between({0, (1, 3)}, [2, 2, 2], inclusive=True),
    where.between(3, {0, (1, 2)}, inclusive=True),
    where.after(3, 2),
    where.after([1, 2, 3], inclusive=True),
    where.after([1, 1], 0, inclusive=True),
    where.after({0, (2, 3, 1)}, 3),
]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_any_passes_select_what_a_loop_over_the_row_does(seed):
    """Rows come in blocks of any size with padding anywhere, or anew from the first token, as without a cache."""
    rng = random.Random(seed)
    rows = [rng.choices(range(4), k=rng.randint(1, 14)) for _ in range(rng.randint(1, 3))]
    trail, done = trail_of(SETS, len(rows)), [0] * len(rows)
    found = {place: [[False] * len(row) for row in rows] for place in SETS}
    while any(n < len(row) for n, row in zip(done, rows, strict=True)):
        anew = rng.random() < 0.1
        width = max(done) + 1 if anew else rng.randint(1, 5)
        done = [0] * len(rows) if anew else done
        ids, positions = torch.full((len(rows), width), 3), torch.full((len(rows), width), -1)
        for b, row in enumerate(rows):
            n = min(rng.randint(0, width), len(row) - done[b])
            columns = sorted(rng.sample(range(width), n))
            ids[b, columns] = torch.tensor(row[done[b] : done[b] + n], dtype=torch.long)
            positions[b, columns] = torch.arange(done[b], done[b] + n)
            done[b] += n
        known = trail.follow(RowPositions(positions, torch.ones(len(rows), dtype=torch.long), token_ids=ids), None)
        for place in SETS:
            mask = place.resolve(known)
            assert not (mask & (positions < 0)).any()
            for b in range(len(rows)):
                for p, hit in zip(positions[b].tolist(), mask[b].tolist(), strict=True):
                    if p >= 0:
                        found[place][b][p] = hit
    for place in SETS:
        assert found[place] == [reference(place, row) for row in rows]


def test_rows_that_are_dropped_copied_and_continued_keep_their_trail():
    places = [where.between([1, 2], 3)]
    trail = trail_of(places, 3)
    lens = torch.ones(3, dtype=torch.long)
    trail.follow(RowPositions(torch.tensor([[0], [0], [0]]), lens, token_ids=torch.tensor([[1], [1], [5]])), None)
    kept = torch.tensor([2, 0])
    trail.follow(RowPositions(torch.tensor([[1], [1]]), lens[:2], token_ids=torch.tensor([[1], [2]])), kept)
    later = trail.continued([0, 1, 2, 0])
    step = RowPositions(
        torch.tensor([[2], [1], [2], [2]]), lens.new_ones(4), token_ids=torch.tensor([[7], [2], [2], [3]])
    )
    assert places[0].resolve(later.follow(step, None))[:, 0].tolist() == [True, False, False, False]
    after = replace_positions(step, 1)
    assert places[0].resolve(later.follow(after, None))[:, 0].tolist() == [True, True, True, False]


def replace_positions(rows, by):
    return RowPositions(rows.positions + by, rows.prompt_lens, token_ids=torch.full_like(rows.positions, 8))


@pytest.mark.parametrize("place", SETS)
def test_descriptions_are_read_back(place):
    assert where.from_json(json.loads(json.dumps(place.to_json()))) == place
    plan = sl.Plan(sl.add(V, coef=1.0, where=place & where.generated(until=9)))
    again = sl.Plan.from_json(plan.to_json())
    assert again == plan
    assert str(again) == str(plan)


def test_events_are_told_as_they_were_given():
    assert str(where.between("<think>", [5, 6], inclusive=True)) == "between('<think>', (5, 6), inclusive=True)"
    assert str(where.after({7, "x"}, 3)) == "after({'x', 7}, n=3)"
    assert where.after(["x", 7]) == where.after({"x", 7})
    assert where.after(torch.tensor([5, 6])) == where.after([5, 6]) != where.after({5, 6})
    assert where.from_json({"kind": "after", "event": "x", "n": None, "inclusive": False}) == where.after("x")


class Words:
    """A tokenizer of words, each one or several ids."""

    unk_token_id, unk_token = 0, "[UNK]"
    words = {"<think>": [4], "</think>": [5, 6], "[UNK]": [0]}

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return {"input_ids": [] if text == " " else self.words.get(text, [0])}


def test_texts_are_spelled_in_the_models_tokens():
    place = where.span("a") | ~(where.between("<think>", {"</think>", 9}) & where.after("[UNK]", 2))
    ids = where.span("a") | ~(where.between(4, [[5, 6], 9]) & where.after(0, 2))
    assert [leaf.rule for leaf in by_tokens([spell(place, Words())])] == [leaf.rule for leaf in by_tokens([ids])]
    assert spell(ids, None) is ids
    condition = sl.when(V, above=0.0, read=where.after("<think>", 1))
    plan = sl.Plan(sl.ablate(V, where=place, when=condition & condition))
    assert not any("think" in str(one) for one in plan.spelled(Words()).sets)
    for text, words in ((" ", r"gives \[\]"), ("zebra", r"gives \[0\]")):
        with pytest.raises(PlanError, match=words):
            spell(where.after(text), Words())
    with pytest.raises(PlanError, match="takes the model's tokenizer"):
        spell(where.after("<think>"), None)


@pytest.mark.usefixtures("unchecked_types")
def test_what_makes_no_sense_is_one_clear_error():
    rows = RowPositions.of_tokens([[5, 6]], [1])
    late = RowPositions(torch.tensor([[3, 4]]), torch.tensor([1]), token_ids=torch.tensor([[5, 6]]))
    cases = {
        "one token can be start and end": lambda: where.between(5, {4, (6, 5)}),
        "between.start=….* takes a token id": lambda: where.between(1.5, 2),
        "after.event=….* empty text": lambda: where.after(""),
        "integers ≥ 0": lambda: where.after([5, -1]),
        "inclusive is True or False": lambda: where.from_json({"kind": "after", "event": 5, "inclusive": 1}),
        r"after\(n=…\)": lambda: where.after(5, 0),
        "half": lambda: where.after("cut \ud83d"),
        "does not know them": lambda: where.after(5).resolve(RowPositions.of_rows([2], [1])),
        "earlier passes": lambda: where.after(5).resolve(late),
        "vocabulary of tiny ends at 6": lambda: check_vocabulary(where.prompt() & where.ids(5, 7), 7, "tiny"),
        "names token 12": lambda: check_vocabulary(~where.between([5, 12], 4), 7, "tiny"),
        "tokenizer": lambda: where.after("<think>").resolve(rows),
    }
    for words, make in cases.items():
        with pytest.raises(PlanError, match=words):
            make()


def test_explain_shows_them():
    plan = sl.Plan(sl.add(V, coef=1.0, where=where.between(5, 6, inclusive=True) & where.generated()))
    shown = sl.explain(plan, [5, 1, 2], completion=[3, 6, 7, 5, 8])
    assert [bool(cell) for cell in shown.cells[V.hook_point.name]] == [False] * 3 + [True, True, False, True, False]
    assert "between(5, 6, inclusive=True) & generated()" in str(shown)
