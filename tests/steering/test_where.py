import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerlab.core.errors import PlanError
from steerlab.steering.positions import where
from steerlab.steering.positions.where import RowPositions, from_json

# beartype draws random items of what it checks
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module:Warning")

# Two rows left-padded to five tokens: lengths 5 and 3, prompts 2 and 3.
ROWS = RowPositions.of_rows([5, 3], [2, 3])


def chosen(positions, rows=ROWS):
    """Absolute positions chosen, per row."""
    mask = positions.resolve(rows)
    return [row_positions[m].tolist() for row_positions, m in zip(rows.positions, mask, strict=True)]


simple = st.one_of(
    st.sampled_from([where.all(), where.prompt(), where.last_prompt(), where.generated(), where.default()]),
    st.builds(lambda a, n: where.generated(after=a, until=a + n), st.integers(0, 4), st.integers(1, 4)),
    st.builds(lambda i: where.index(*i), st.lists(st.integers(-6, 6), min_size=1, max_size=3)),
)
sets = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=6,
)
batches = st.lists(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=4
)


def rows_of(batch):
    return RowPositions.of_rows([n for n, _ in batch], [p for _, p in batch])


def test_rows_count_their_own_tokens():
    assert ROWS.positions.tolist() == [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]
    assert ROWS.is_token.tolist() == [[True] * 5, [False, False, True, True, True]]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (where.all(), [[0, 1, 2, 3, 4], [0, 1, 2]]),
        (where.prompt(), [[0, 1], [0, 1, 2]]),
        (where.last_prompt(), [[1], [2]]),
        (where.generated(), [[2, 3, 4], []]),
        (where.generated(after=1), [[3, 4], []]),
        (where.generated(until=2), [[2, 3], []]),
        (where.generated(after=1, until=2), [[3], []]),
        (where.default(), [[1, 2, 3, 4], [2]]),
        (where.index(0), [[0], [0]]),
        (where.index(3), [[3], []]),
        (where.index(-1), [[1], [2]]),
        (where.index(-3), [[], [0]]),
        (where.index(0, -1, 99), [[0, 1], [0, 2]]),
        (~where.index(0), [[1, 2, 3, 4], [1, 2]]),
        (where.prompt() & ~where.last_prompt(), [[0], [0, 1]]),
        (~where.all(), [[], []]),
    ],
)
def test_worked_cases(positions, expected):
    assert chosen(positions) == expected


def test_a_position_is_absolute_in_a_decoding_pass():
    # one fed-back token per row, at positions 5 and 3 of rows whose prompts have 4 and 3 tokens; a third row has ended
    step = RowPositions(torch.tensor([[5], [3], [-1]]), torch.tensor([4, 3, 2]))
    assert where.index(5).resolve(step)[:, 0].tolist() == [True, False, False]
    assert where.generated(until=1).resolve(step)[:, 0].tolist() == [False, True, False]
    assert where.last_prompt().resolve(step).any().item() is False
    assert (~where.index(5)).resolve(step)[:, 0].tolist() == [False, True, False]


@given(sets, batches)
def test_padding_never_matches(positions, batch):
    rows = rows_of(batch)
    assert not (positions.resolve(rows) & ~rows.is_token).any()


@given(sets, sets, batches)
def test_algebra(a, b, batch):
    rows = rows_of(batch)
    left, right = a.resolve(rows), b.resolve(rows)
    assert torch.equal((a | b).resolve(rows), left | right)
    assert torch.equal((a & b).resolve(rows), left & right)
    assert torch.equal((~a).resolve(rows), ~left & rows.is_token)
    assert torch.equal((~(a | b)).resolve(rows), (~a & ~b).resolve(rows))
    assert torch.equal((~~a).resolve(rows), left)


@given(sets, batches)
def test_a_row_in_a_batch_equals_the_row_alone(positions, batch):
    together = chosen(positions, rows_of(batch))
    assert together == [chosen(positions, rows_of([row]))[0] for row in batch]


@given(sets)
def test_json_round_trip(positions):
    again = from_json(positions.to_json())
    assert again == positions
    assert hash(again) == hash(positions)
    assert str(again) == str(positions)


def test_text_shows_the_structure():
    a, b, c = where.prompt(), where.index(2), where.generated(after=1, until=3)
    assert str((a | b) & ~c) == "(prompt() | index(2)) & ~generated(after=1, until=3)"
    assert str(~(a & b)) == "~(prompt() & index(2))"


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "all",
        {},
        {"kind": "nowhere"},
        {"kind": ["all"]},
        {"kind": "index"},
        {"kind": "index", "indices": "ab"},
        {"kind": "index", "indices": []},
        {"kind": "generated", "after": -1, "until": None},
        {"kind": "either", "of": [{"kind": "all"}]},
        {"kind": "not", "of": [{"kind": "all"}, {"kind": "all"}]},
        {"kind": "both", "of": [{"kind": "all"}, 3]},
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_other_json_is_refused(data):
    with pytest.raises(PlanError):
        from_json(data)


@pytest.mark.parametrize(
    "bad", [{"after": -1}, {"after": 1.5}, {"until": 0}, {"after": 3, "until": 3}, {"after": True}]
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_generated_is_refused(bad):
    with pytest.raises(PlanError):
        where.generated(**bad)


@pytest.mark.parametrize("bad", [(), (1.0,), ("1",), (True,)])
@pytest.mark.usefixtures("unchecked_types")
def test_bad_index_is_refused(bad):
    with pytest.raises(PlanError):
        where.index(*bad)


@pytest.mark.parametrize("other", [None, 3, "prompt", True])
def test_only_positions_combine(other):
    with pytest.raises(PlanError, match="combine"):
        _ = where.all() | other
    with pytest.raises(PlanError, match="combine"):
        _ = where.all() & other


@pytest.mark.parametrize(
    "combine",
    [
        lambda: where.last_prompt() or where.generated(),
        lambda: where.prompt() and where.index(0),
        lambda: not where.prompt(),
    ],
)
def test_words_of_python_do_not_combine_positions(combine):
    with pytest.raises(PlanError, match=r"\|, & and ~"):
        combine()


@pytest.mark.parametrize("values", [[[True], [True, False]], None, "abc", torch.zeros(2, 0, dtype=torch.bool)])
def test_what_is_no_table_of_booleans_is_no_mask(values):
    with pytest.raises(PlanError, match="mask"):
        where.mask(values)


def test_a_described_mask_holds_no_negative_positions():
    with pytest.raises(PlanError, match=r"≥ 0, got \(\(-1,\),\)"):
        from_json({"kind": "mask", "rows": [[-1]]})


def test_integers_of_numpy_are_integers(unchecked_types):
    assert where.index(np.int64(3)) == where.index(3)
    assert where.ids(np.int32(3)) == where.ids(3)


def test_a_written_combination_may_hold_more_than_two():
    parts = [where.last_prompt(), where.index(2), where.generated(after=1)]
    data = [part.to_json() for part in parts]
    assert from_json({"kind": "either", "of": data}) == parts[0] | parts[1] | parts[2]
    assert from_json({"kind": "both", "of": data}) == parts[0] & parts[1] & parts[2]


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"start": 1, "end": 2}, "with 'kind', one of all, "),
        ({"kind": "betwen", "start": 1, "end": 2}, "one of all, .*between, after, either, both, not"),
        ({"kind": "between", "start": 1}, "keys of between are kind, start, end, inclusive"),
        ({"kind": "index", "indices": [0], "more": 1}, "keys of index are kind, indices"),
        ({"kind": "prompt", "of": 3}, "prompt has no other key"),
        ({"kind": "either", "of": [{"kind": "all"}]}, "two or more descriptions"),
        ({"kind": "not", "of": "prompt"}, "a list of one description"),
    ],
)
def test_a_refused_description_says_what_is_due(data, wanted):
    with pytest.raises(PlanError, match=wanted):
        from_json(data)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("token_id", r"did you mean where\.ids"),
        ("lastprompt", r"did you mean where\.last_prompt"),
        ("xyz", "there are all, prompt"),
    ],
)
def test_a_name_that_is_not_there_says_which_are(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(where, name)
    assert not hasattr(where, "__wrapped__")


def test_the_names_it_lists_are_those_that_give_positions():
    with pytest.raises(AttributeError) as raised:
        where.xyz  # noqa: B018
    listed = str(raised.value).partition("there are ")[2].rstrip(".").split(", ")
    own = [name for name, one in vars(where).items() if getattr(one, "__module__", "") == where.__name__]
    assert set(listed) == {name for name in own if not name.startswith("_")} - {"as_where", "from_json"}
