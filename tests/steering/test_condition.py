import math

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import PlanError
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions.condition import Condition, Gate
from steerlab.steering.positions.condition import from_json as conditions_from_json

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
PROBE = sl.SteeringVector.from_tensor(torch.tensor([2.0, 0.0]), layer=0)
LATER = PROBE.at(2)
# Three rows of three prompt tokens: the last token's first coordinate is 5, −5 and 1.
EARLY = torch.zeros(3, 3, 2)
EARLY[:, -1, 0] = torch.tensor([5.0, -5.0, 1.0])
EARLY[:, -1, 1] = torch.tensor([0.0, 0.0, math.sqrt(3)])
ROWS = RowPositions.of_rows([3, 3, 3], [3, 3, 3])


def run_with(condition, where=None, h=EARLY, rows=ROWS):
    plan = sl.Plan(sl.add(V, coef=1.0, when=condition, where=where))
    run = PlanRun(plan, len(h))
    run.begin(rows)
    run.edit(PROBE.hook_point, h)
    return run, run.edit(V.hook_point, torch.ones_like(h))


def receipts(run, length=3):
    n = run.n_rows
    return run.receipts(
        token_ids=[[1] * length] * n,
        prompt_lens=[3] * n,
        prompt_indices=list(range(n)),
        row_indices=list(range(n)),
        plan_hash="h",
    )


def test_each_row_answers_for_itself():
    run, after = run_with(sl.when(PROBE, above=3.0))
    assert (after[:, -1, 0] - 1).tolist() == [3, 0, 0]
    made = receipts(run)
    assert [r.edited for r in made] == [r.expected for r in made] == [1, 0, 0]
    assert [r.edits[0].condition_passed for r in made] == [True, False, False]


@pytest.mark.parametrize(
    ("condition", "passing"),
    [
        (sl.when(PROBE, above=0.0), [True, False, True]),
        (sl.when(PROBE, below=3.0), [False, True, True]),
        (sl.when(PROBE, above=0.0, below=3.0), [False, False, True]),
        # the cosines are 1, −1 and 1/2
        (sl.when(PROBE, above=0.6, reading="cosine"), [True, False, False]),
        (sl.when(PROBE, above=0.4, below=0.6, reading="cosine"), [False, False, True]),
        # the mean over the prompt is 5/3, −5/3 and 1/3
        (sl.when(PROBE, above=1.0, read=sl.where.prompt()), [True, False, False]),
        (sl.when(PROBE, above=2.0, read=sl.where.prompt()), [False, False, False]),
    ],
    ids=str,
)
def test_thresholds_and_readings_by_hand(condition, passing):
    run, after = run_with(condition)
    assert [bool(x) for x in (after[:, -1, 0] > 1)] == passing
    assert [r.edits[0].condition_passed for r in receipts(run)] == passing


def test_a_probe_at_the_edits_own_layer_reads_the_stream_before_the_edit():
    same = sl.SteeringVector.from_tensor(torch.tensor([2.0, 0.0]), layer=1)
    first = sl.add(V, coef=100.0)
    plan = sl.Plan(first, sl.add(V, coef=1.0, when=sl.when(same, above=3.0)))
    run = PlanRun(plan, 3)
    run.begin(ROWS)
    after = run.edit(V.hook_point, EARLY)
    assert (after[:, -1, 0] - EARLY[:, -1, 0] - 300).tolist() == [3, 0, 0]


def test_a_later_layer_steers_generated_tokens_from_the_prompt():
    plan = sl.Plan(sl.add(V, coef=1.0, when=sl.when(LATER, above=3.0), where=sl.where.generated()))
    run = PlanRun(plan, 3)
    run.begin(ROWS)
    assert torch.equal(run.edit(V.hook_point, EARLY), EARLY)
    run.edit(LATER.hook_point, EARLY)
    run.begin(RowPositions(torch.full((3, 1), 3), torch.tensor([3, 3, 3])))
    step = torch.ones(3, 1, 2)
    assert (run.edit(V.hook_point, step) - step)[:, 0, 0].tolist() == [3, 0, 0]
    run.edit(LATER.hook_point, step)  # a generated token is no part of the reading
    assert [r.edited for r in receipts(run, length=4)] == [1, 0, 0]


def test_an_edit_before_its_answer_is_an_error_not_a_guess():
    plan = sl.Plan(sl.add(V, coef=1.0, when=sl.when(LATER, above=3.0)))
    run = PlanRun(plan, 3)
    run.begin(ROWS)
    run.edit(V.hook_point, EARLY)
    run.edit(LATER.hook_point, EARLY)
    with pytest.raises(PlanError, match="before its condition was answered"):
        receipts(run)


def test_a_prompt_run_in_two_blocks_gives_the_same_reading():
    whole, parts = (
        Gate(sl.when(PROBE, above=1.0, read=sl.where.prompt()), 3),
        Gate(sl.when(PROBE, above=1.0, read=sl.where.prompt()), 3),
    )
    whole.read(EARLY, ROWS, None)
    lens = torch.tensor([3, 3, 3])
    parts.read(EARLY[:, :2], RowPositions(ROWS.positions[:, :2], lens), None)
    answered, _ = parts.answers(RowPositions(ROWS.positions[:, :2], lens), None)
    assert not answered.any()
    parts.read(EARLY[:, 2:], RowPositions(ROWS.positions[:, 2:], lens), None)
    parts.read(EARLY, ROWS, None)  # run again, as without a cache: nothing is counted twice
    assert parts.fired() == whole.fired() == [True, False, False]


def test_answers_stay_with_their_rows_when_rows_leave_or_are_continued():
    run, _ = run_with(sl.when(PROBE, above=0.0))
    later = run.continued([2, 1, 1, 0])
    later.begin(RowPositions(torch.full((4, 1), 3), torch.tensor([3, 3, 3, 3])))
    step = torch.ones(4, 1, 2)
    assert (later.edit(V.hook_point, step) - step)[:, 0, 0].tolist() == [3, 0, 0, 3]
    run.narrow(torch.tensor([1, 2]))
    run.begin(RowPositions(torch.full((2, 1), 3), torch.tensor([3, 3])))
    assert (run.edit(V.hook_point, step[:2]) - step[:2])[:, 0, 0].tolist() == [0, 3]


def test_a_condition_that_reads_nothing_in_a_prompt_is_an_error():
    run, _ = run_with(sl.when(PROBE, above=0.0, read=sl.where.index(7)))
    with pytest.raises(PlanError, match="selects no token in the prompt of row 0"):
        receipts(run)


def test_round_trip_through_json_and_identity_by_content():
    plan = sl.Plan(sl.add(V, coef=1.0, when=sl.when(PROBE, above=0.5, reading="cosine", read=sl.where.index(0, -1))))
    again = sl.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.edits[0].when == plan.edits[0].when
    assert plan != sl.Plan(sl.add(V, coef=1.0, when=sl.when(PROBE, above=0.6, reading="cosine")))
    assert "cosine at blocks.0.hook_resid_post, index(0, -1), > 0.5" in str(plan)


def test_scaled_and_control_vectors_keep_the_condition():
    edit = sl.add(V, coef=1.0, when=sl.when(PROBE, above=0.5))
    assert edit.scaled(2.0).when == edit.when
    assert edit.with_vector(V.scaled(-1.0)).when == edit.when


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"above": float("nan")},
        {"above": 1.0, "below": 1.0},
        {"above": 1.0, "reading": "dot"},
        {"above": 2.0, "reading": "cosine"},
        {"below": -1.0, "reading": "cosine"},
    ],
    ids=str,
)
def test_a_condition_that_nothing_can_pass_is_refused(wrong, unchecked_types):
    with pytest.raises(PlanError):
        Condition(PROBE, **wrong)


def test_the_probe_must_fit_the_model(tiny_llama_engine):
    info = tiny_llama_engine.info
    vector = sl.SteeringVector.from_tensor(torch.ones(info.d_model), layer=0)
    narrow = sl.SteeringVector.from_tensor(torch.ones(5), layer=0)
    with pytest.raises(sl.VectorShapeError):
        tiny_llama_engine.score(
            ["a"], [[" b"]], plan=sl.Plan(sl.add(vector, coef=1.0, when=sl.when(narrow, above=0.0)))
        )


# --- several conditions -------------------------------------------------------------------------------------------

HIGH, LOW, ALIGNED = sl.when(PROBE, above=3.0), sl.when(PROBE, below=-3.0), sl.when(PROBE, above=0.4, reading="cosine")


@pytest.mark.parametrize(
    ("joined", "passing"),
    [  # the readings are 5, −5 and 1, the cosines 1, −1 and 1/2
        (HIGH & ALIGNED, [True, False, False]),
        (HIGH | LOW, [True, True, False]),
        (ALIGNED & (HIGH | LOW), [True, False, False]),
        ((ALIGNED & HIGH) | LOW, [True, True, False]),
    ],
    ids=str,
)
def test_conditions_join(joined, passing):
    run, after = run_with(joined)
    assert (after[:, -1, 0] > 1).tolist() == passing
    made = receipts(run)
    assert [r.edits[0].condition_passed for r in made] == passing
    plan = sl.Plan(sl.add(V, coef=1.0, when=joined))
    assert sl.Plan.from_json(plan.to_json()) == plan
    assert plan.conditions == list(joined.leaves)


def test_joined_conditions_are_told_apart_and_wrong_ones_refused():
    plans = [sl.Plan(sl.add(V, coef=1.0, when=one)) for one in (HIGH, HIGH & LOW, HIGH | LOW, LOW | HIGH)]
    assert len({plan.hash for plan in plans}) == 4
    with pytest.raises(PlanError, match="Only conditions join"):
        _ = HIGH & 3.0
    with pytest.raises(PlanError, match="not with and, or"):
        _ = HIGH and LOW
    with pytest.raises(PlanError, match="joined by"):
        conditions_from_json({"by": "xor", "of": [HIGH.to_json(), LOW.to_json()]})
