import math

import pytest
import torch

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import ReceiptError
from steerlab.core.receipts import EditReceipt, Receipt
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan
from steerlab.steering.positions.where import RowPositions
from steerlab.steering.vectors import SteeringVector

POINT = HookPoint(1)
V = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
X = SteeringVector.from_tensor(torch.tensor([1.0, 0.0]), layer=1)
ROWS = RowPositions.of_rows([3, 2], [2, 1])  # row 1 has one padding token in front


def run_once(plan, h, rows=ROWS):
    run = PlanRun(plan, len(h))
    run.begin(rows)
    return run, run.edit(POINT, h)


def receipts(run, lengths=(3, 2), prompt_lens=(2, 1)):
    return run.receipts(
        token_ids=[[7] * length for length in lengths],
        prompt_lens=prompt_lens,
        prompt_indices=[0, 1],
        row_indices=[0, 1],
        plan_hash="h",
    )


def test_edits_the_stated_positions_and_nothing_else():
    h = torch.randn(2, 3, 2)
    _, after = run_once(Plan(sl.add(V, coef=2.0)), h)
    expected = torch.zeros(2, 3, 2)
    expected[0, 1:] = expected[1, 1:] = torch.tensor([6.0, 8.0])
    torch.testing.assert_close(after - h, expected)
    assert torch.equal(after[0, 0], h[0, 0])
    assert torch.equal(after[1, 0], h[1, 0])


def test_padding_is_never_edited_even_by_all():
    h = torch.randn(2, 3, 2)
    _, after = run_once(Plan(sl.add(V, coef=1.0, where=sl.where.all())), h)
    assert torch.equal(after[1, 0], h[1, 0])
    assert not torch.equal(after[1, 1], h[1, 1])


def test_edits_at_one_point_see_the_result_of_those_before():
    h = torch.tensor([[[5.0, 1.0]]])
    rows = RowPositions.of_rows([1], [1])
    adding, clamping = sl.add(X, coef=10.0), sl.clamp(X, hi=8.0)
    assert run_once(Plan(adding, clamping), h, rows)[1].flatten().tolist() == [8, 1]
    assert run_once(Plan(clamping, adding), h, rows)[1].flatten().tolist() == [15, 1]


def test_other_points_are_left_alone():
    h = torch.randn(2, 3, 2)
    run = PlanRun(Plan(sl.add(V, coef=1.0)), 2)
    run.begin(ROWS)
    assert torch.equal(run.edit(HookPoint(2), h), h)
    assert torch.equal(run.edit(HookPoint(1, "resid_pre"), h), h)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stream_keeps_its_dtype(dtype):
    h = torch.randn(2, 3, 2).to(dtype)
    _, after = run_once(Plan(sl.add(V, coef=1.0), sl.ablate(X), sl.clamp(V, hi=1.0)), h)
    assert after.dtype == dtype


def test_delta_is_computed_in_float32_and_added_in_the_streams_dtype():
    h = torch.randn(1, 1, 2).to(torch.bfloat16)
    _, after = run_once(Plan(sl.ablate(V)), h, RowPositions.of_rows([1], [1]))
    delta = -(h.float() @ V.unit)[..., None] * V.unit
    assert torch.equal(after, h + delta.to(torch.bfloat16))


def test_scale_zero_changes_no_bit():
    h = torch.randn(2, 3, 2)
    plan = Plan(sl.add(V, coef=9.0), sl.ablate(X), sl.clamp(V, hi=-5.0)).scaled(0.0)
    assert torch.equal(run_once(plan, h)[1], h)


# --- receipts -----------------------------------------------------------------------------------------------------


def test_receipts_count_tokens_and_relative_change_per_row():
    h = torch.zeros(2, 3, 2)
    h[..., 0] = 10.0
    run, _ = run_once(Plan(sl.add(V, coef=1.0), sl.ablate(V, where=sl.where.index(0))), h)
    first, second = receipts(run)
    assert [(e.edited, e.expected, e.layer) for e in first.edits] == [(2, 2, 1), (1, 1, 1)]
    assert [(e.edited, e.expected) for e in second.edits] == [(2, 2), (1, 1)]
    assert first.edits[0].mean_relative_change == pytest.approx(0.5)
    assert first.edits[0].operator == "add(coef=1)"
    assert (first.edited, first.expected, first.plan_hash) == (3, 3, "h")


def test_a_zero_stream_elsewhere_does_not_spoil_the_mean():
    h = torch.zeros(2, 3, 2)
    h[:, 1:, 0] = 10.0
    run, _ = run_once(Plan(sl.add(V, coef=1.0)), h)
    assert receipts(run)[0].mean_relative_change == pytest.approx(0.5)


def test_no_edit_is_a_missing_mean_not_zero():
    run, _ = run_once(Plan(sl.add(V, coef=1.0, where=sl.where.index(7))), torch.ones(2, 3, 2))
    first, _ = receipts(run)
    assert (first.edited, first.expected) == (0, 0)
    assert math.isnan(first.mean_relative_change)
    assert math.isnan(first.edits[0].mean_relative_change)


def test_a_skipped_pass_is_an_error():
    run = PlanRun(Plan(sl.add(V, coef=1.0)), 2)
    run.begin(ROWS)
    with pytest.raises(ReceiptError, match="should edit 2 tokens and edited 0"):
        receipts(run)


def test_a_hook_that_ran_twice_is_an_error():
    run, after = run_once(Plan(sl.add(V, coef=1.0)), torch.ones(2, 3, 2))
    run.edit(POINT, after)
    with pytest.raises(ReceiptError, match="should edit 2 tokens and edited 4"):
        receipts(run)


def test_a_pass_of_another_shape_is_an_error():
    run = PlanRun(Plan(sl.add(V, coef=1.0)), 2)
    with pytest.raises(ReceiptError, match="call begin first"):
        run.edit(POINT, torch.ones(2, 3, 2))
    run.begin(ROWS)
    with pytest.raises(ReceiptError, match=r"\(2, 4\).*\(2, 3\)"):
        run.edit(POINT, torch.ones(2, 4, 2))


def test_check_names_the_row_and_the_counts():
    receipt = Receipt(0, 5, None, (EditReceipt("blocks.1.hook_resid_post", 1, "add(coef=1)", 2, 3, 0.1),))
    with pytest.raises(ReceiptError, match=r"Row 5: add\(coef=1\) at blocks\.1\.hook_resid_post should edit 3"):
        receipt.check()


def test_mean_change_of_a_receipt_weighs_by_edits():
    parts = (
        EditReceipt("a", 1, "x", 1, 1, 0.5),
        EditReceipt("b", 2, "y", 3, 3, 0.1),
        EditReceipt("c", 3, "z", 0, 0, math.nan),
    )
    assert Receipt(0, 0, None, parts).mean_relative_change == pytest.approx(0.2)


def test_counts_add_up_over_decoding_passes_and_continued_rows():
    plan = Plan(sl.add(V, coef=1.0))
    prompt = PlanRun(plan, 1)
    prompt.begin(RowPositions.of_rows([2], [2]))
    prompt.edit(POINT, torch.ones(1, 2, 2))
    later = prompt.continued([0, 0])
    later.begin(RowPositions(torch.tensor([[2, 3], [2, -1]]), torch.tensor([2, 2])))
    later.edit(POINT, torch.ones(2, 2, 2))
    assert [r.edited for r in receipts(later, lengths=(4, 3), prompt_lens=(2, 2))] == [3, 2]
    assert prompt.counts()[0].tolist() == [[1]]


def test_an_empty_plan_has_empty_receipts():
    assert [r.edits for r in receipts(PlanRun(Plan(), 2))] == [(), ()]
