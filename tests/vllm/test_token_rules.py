"""What workers know of tokens so far, pass by pass, against whole rows: chunks, slots, preemptions and prefixes."""

import random

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.engines.vllm._client.compiled_plan import compile_plan
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.engines.vllm._worker import token_rules
from steerlab.engines.vllm._worker.steering_state import SteeringState
from steerlab.engines.vllm._worker.tables import ANSWERS, SLOT, Tables
from steerlab.steering.positions._rows import RowPositions

pytestmark = pytest.mark.vllm

w = sl.where
CONFIG = SteeringConfig((1,), max_directions=2, max_runs=2, capture_tokens=0, max_token_rules=3)
VECTOR = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
PLANS = [
    w.between([0, 1], 2) | w.ids(3),
    w.between({0, (1, 3)}, [2, 2, 2], inclusive=True) & ~w.after(3, 2),
    w.after([1, 1, 0, 2, 3, 1, 0, 0], inclusive=True) | w.after([1, 1], 0, inclusive=True) | w.after({0, (2, 3, 1)}, 3),
]
ALWAYS_FOLLOWED = (((0, 100, 0b11111110),),)


def made_state():
    device = torch.device("cpu")
    tables = Tables.make(CONFIG, n_points=1, n_slots=4, n_tokens=64, d_model=2, dtype=torch.float32, device=device)
    state, leaves = SteeringState(CONFIG, tables, [0]), {}
    for index, place in enumerate(PLANS):
        compiled = compile_plan(sl.Plan(sl.add(VECTOR, coef=1.0, where=place)), CONFIG)
        state.hold(f"{index}", compiled.tables)
        leaves[f"{index}"] = compiled.followed
    return state, leaves


def expected(leaves, tokens):
    """Per token of a whole row, to which rules it belongs, as bits."""
    rows = RowPositions.of_tokens([tokens], [1])
    return sum(leaf.resolve(rows)[0].long() << place for place, leaf in enumerate(leaves))


@pytest.mark.parametrize("at_once", [2048, 5])
@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_the_whole_row(monkeypatch, seed, at_once):
    """Requests take turns in slots; some begin after a prefix, go on elsewhere, or run anew from anywhere."""
    monkeypatch.setattr(token_rules, "AT_ONCE", at_once)
    rng, (state, leaves) = random.Random(seed), made_state()
    rows = {f"r{i}": rng.choices(range(4), k=rng.randint(6, 24)) for i in range(6)}
    done = {name: rng.choice([0, 0, 5]) for name in rows}
    plans = {name: rng.choice(["0", "1", "2", None]) for name in rows}
    slots: dict[str, int] = {}
    one_by_one = False
    for _ in range(60):
        waiting = [name for name in rows if name not in slots and done[name] < len(rows[name])]
        for name in rng.sample(list(slots), len(slots)):
            ended = done[name] >= len(rows[name])
            if ended or (not one_by_one and rng.random() < 0.15):
                state.leave(slots.pop(name))
                done[name] = done[name] if ended else rng.choice([done[name], 0, done[name] // 2])
        if not one_by_one:
            for name in waiting[: 4 - len(slots)]:
                slots[name] = rng.choice([slot for slot in range(4) if slot not in slots.values()])
                groups = ALWAYS_FOLLOWED if plans[name] is not None else ()
                state.enter(slots[name], RequestSpec(name, plans[name], groups), lambda name=name: rows[name])
        one_by_one = rng.random() < 0.6  # nothing changes then, and every request goes on by one token
        if not slots:
            continue
        names = list(slots)
        lengths = [1 if one_by_one else rng.randint(1, min(9, len(rows[n]) - done[n])) for n in names]
        ids = torch.tensor([t for n, k in zip(names, lengths, strict=True) for t in rows[n][done[n] : done[n] + k]])
        columns = ([slots[n] for n in names], [done[n] for n in names], lengths)
        state.begin(*(np.array(column, dtype=np.int64) for column in columns), ids.to(torch.int32))
        table, first = state.tables.tokens, 0
        for n, k in zip(names, lengths, strict=True):
            if plans[n] is not None:
                assert (table[first : first + k, SLOT] == slots[n]).all()
                wanted = expected(leaves[plans[n]], rows[n])[done[n] : done[n] + k]
                assert table[first : first + k, ANSWERS].tolist() == wanted.tolist()
            done[n] += k
            first += k
    accounts = state.settle(list(rows))
    assert not any(record.problem for record in accounts.values())


def test_a_request_whose_tokens_are_not_known_says_so():
    state, _ = made_state()
    state.enter(0, RequestSpec("x", "0", ALWAYS_FOLLOWED), lambda: [1, 2, 3])
    state.begin(*(np.array([n], dtype=np.int64) for n in (0, 5, 2)), torch.tensor([1, 2]))
    assert "only 3 are known" in state.settle(["x"])["x"].problem


def test_a_key_names_runs_with_what_decides_about_them():
    specs = [
        RequestSpec("x", "0", (((0, 40, 0b10),), ((3, 9),))),
        RequestSpec("x", "0", (((0, 40, 0b11),), ((3, 9),))),
        RequestSpec("x", "0", (((0, 40),), ((3, 9),))),
    ]
    assert len({spec.key_between(32, 64) for spec in specs}) == 3
    assert [spec.follows for spec in specs] == [True, True, False]
    for spec in specs:
        (text,) = spec.to_args().values()
        assert RequestSpec.of(type("P", (), {"extra_args": {"steerlab": text}})) == spec
    for truths in ("[[2], [1, 1]]", '[["2"], []]', "[[2]]"):
        broken = specs[0].to_args()["steerlab"].replace("[[2], []]", truths)
        assert RequestSpec.of(type("P", (), {"extra_args": {"steerlab": broken}})) is None
