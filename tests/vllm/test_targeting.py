import pytest

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.engines.vllm.targeting import Row, positions_of, resolve
from steerlab.steering.positions.prompt_lookup import PromptContent

w = sl.where
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
    assert resolve([where], GROWING, 4) == (runs,)


def test_tokens_that_are_known_may_be_looked_at():
    assert resolve([w.ids(6)], KNOWN, 4) == (((1, 2), (3, 5)),)
    assert positions_of(w.ids(6), KNOWN) == ((1, 2), (3, 5))


@pytest.mark.parametrize("where", [w.ids(6), ~w.ids(6), w.ids(6, 7) & w.generated(), w.ids(6) | w.ids(8)])
def test_tokens_still_to_come_are_refused(where):
    with pytest.raises(PlanError, match="still to be generated"):
        resolve([where], GROWING, 4)


def test_too_many_runs_name_the_argument():
    with pytest.raises(PlanError, match="max_runs=3"):
        resolve([w.index(0, 2, 4)], GROWING, 2)


def test_rows_of_one_shape_share_positions_unless_a_set_looks_at_tokens():
    other = Row((6, 5, 5, 5), 4, 8, PromptContent(0, 1, (6, 5, 5, 5)))
    longer = Row((*TOKENS, 9), 5, 9, PromptContent(0, 1, (*TOKENS, 9)))
    plain, looking = w.last_prompt() | w.index(0), w.ids(6) & w.prompt()
    assert resolve([plain], GROWING, 4)[0] is resolve([plain], other, 4)[0]
    assert resolve([plain], longer, 4) == (((0, 1), (4, 5)),)
    assert resolve([looking], GROWING, 4) == (((1, 2), (3, 4)),)
    assert resolve([looking], other, 4) == (((0, 1),),)
