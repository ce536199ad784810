import pytest

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.engines.vllm._client.position_runs import Row, Selection, positions_of, resolve
from steerlab.steering.positions._prompt_lookup import PromptContent

w = sl.where


def resolved(wheres, row, max_runs):
    return resolve([Selection(where) for where in wheres], row, max_runs)


TOKENS = (5, 6, 7, 6)
CONTENT = PromptContent(0, 1, TOKENS)
GROWING = Row(TOKENS, 4, 8, CONTENT)
KNOWN = Row((*TOKENS, 6, 9), 4, 6, CONTENT)


@pytest.mark.parametrize(
    ("where", "runs"),
    [
        (w.all(), ((0, 8),)),
        (w.prompt(), ((0, 4),)),
        (w.last_prompt(), ((3, 4),)),
        (w.last_prompt() | w.generated(), ((3, 8),)),
        (w.generated(after=1, until=3), ((5, 7),)),
        (w.index(0, -1, 6), ((0, 1), (3, 4), (6, 7))),
        (~w.index(2), ((0, 2), (3, 8))),
        (w.ids(6) & w.prompt(), ((1, 2), (3, 4))),
        (w.mask([True, False, True]), ((0, 1), (2, 3))),
        (w.ids(6) | ~w.ids(6), ((0, 8),)),
    ],
)
def test_positions_are_absolute_runs(where, runs):
    assert resolved([where], GROWING, 4) == (runs,)


def test_tokens_that_are_known_may_be_looked_at():
    assert resolved([w.ids(6)], KNOWN, 4) == (((1, 2), (3, 5)),)
    assert positions_of(w.ids(6), KNOWN) == ((1, 2), (3, 5))


@pytest.mark.parametrize("where", [w.ids(6), ~w.ids(6), w.ids(6, 7) & w.generated(), w.ids(6) | w.ids(8)])
def test_tokens_still_to_come_are_refused(where):
    with pytest.raises(PlanError, match="still to be generated"):
        resolved([where], GROWING, 4)


def test_too_many_runs_name_the_argument():
    with pytest.raises(PlanError, match="max_runs=3"):
        resolved([w.index(0, 2, 4)], GROWING, 2)


def test_rows_of_one_shape_share_positions_unless_a_set_looks_at_tokens():
    other = Row((6, 5, 5, 5), 4, 8, PromptContent(0, 1, (6, 5, 5, 5)))
    longer = Row((*TOKENS, 9), 5, 9, PromptContent(0, 1, (*TOKENS, 9)))
    plain, looking = w.last_prompt() | w.index(0), w.ids(6) & w.prompt()
    assert resolved([plain], GROWING, 4)[0] is resolved([plain], other, 4)[0]
    assert resolved([plain], longer, 4) == (((0, 1), (4, 5)),)
    assert resolved([looking], GROWING, 4) == (((1, 2), (3, 4)),)
    assert resolved([looking], other, 4) == (((0, 1),),)


def test_a_schedule_leaves_out_positions_at_which_it_is_zero():
    fading = sl.schedule.linear(1.0, 0.0, over=2)
    assert resolve([Selection(w.all(), fading), Selection(w.all(), sl.schedule.window(1, 3))], GROWING, 4) == (
        ((0, 6),),
        ((5, 7),),
    )
