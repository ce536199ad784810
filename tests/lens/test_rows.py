import pytest
import torch

from steerlab._runtime.capturing import plan_hooks
from steerlab._runtime.rows import Rows, left_padded, right_padded
from steerlab.engines.lens._hooking import attached
from steerlab.steering._run import PlanRun
from tests.lens.helpers import strong_plan

IDS = [15, 96, 11, 61, 6, 200, 33, 7]


def rows_for(engine, plan, prompt_lens):
    run = PlanRun(plan, len(prompt_lens))
    return run, Rows(engine.model.original_model, run, prompt_lens)


def test_padding():
    ids, valid = left_padded([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [4, 4, 4]]
    assert valid.tolist() == [[True, True, True], [False, False, True]]
    ids, valid = right_padded([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert valid.tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("cuts", [[8], [3, 5], [1] * 8, [7, 1]])
def test_cached_blocks_equal_one_uncached_pass(tiny_engine, steered, cuts):
    _, engine = tiny_engine
    plan = strong_plan(engine).resolved(engine.median_norm) if steered else strong_plan(engine).scaled(0)
    run, rows = rows_for(engine, plan, [4])
    parts, start = [], 0
    with attached(engine.model, plan_hooks(run)):
        for cut in cuts:
            parts.append(rows.extend(*left_padded([IDS[start : start + cut]])))
            start += cut
    other, whole = rows_for(engine, plan, [4])
    with attached(engine.model, plan_hooks(other)):
        expected = whole.extend(*left_padded([IDS]))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(run.counts()[0], other.counts()[0])


@pytest.mark.parametrize("junk", [0, 1, 2, 383])
def test_left_padding_changes_nothing_whatever_stands_there(tiny_engine, junk):
    _, engine = tiny_engine
    plan = strong_plan(engine)
    alone_run, alone = rows_for(engine, plan, [3])
    with attached(engine.model, plan_hooks(alone_run)):
        expected = alone.extend(*left_padded([IDS[:3]]))
    run, rows = rows_for(engine, plan, [3, 8])
    ids, valid = left_padded([IDS[:3], IDS])
    ids[~valid] = junk
    with attached(engine.model, plan_hooks(run)):
        found = rows.extend(ids, valid)[:1, -3:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_row_may_be_continued_many_times_and_stays_as_it_was(tiny_engine):
    _, engine = tiny_engine
    run, rows = rows_for(engine, strong_plan(engine).scaled(0), [3, 5])
    with attached(engine.model, plan_hooks(run)):
        rows.extend(*left_padded([IDS[:3], IDS[:5]]))
    cached = [layer.keys.clone() for layer in rows.cache.layers]
    chosen = rows.selected([1, 0, 1])
    with attached(engine.model, plan_hooks(chosen.run)):
        found = chosen.extend(*right_padded([[9, 8], [7], [6, 5]]))
    assert all(torch.equal(a, layer.keys) for a, layer in zip(cached, rows.cache.layers, strict=True))
    for row, ids in ((0, [*IDS[:5], 9, 8]), (1, [*IDS[:3], 7]), (2, [*IDS[:5], 6, 5])):
        expected = engine.logits(ids)
        n = len(ids) - (3 if row == 1 else 5)
        torch.testing.assert_close(found[row, :n], expected[-n:], atol=1e-4, rtol=1e-4)


def test_only_the_last_logits_are_kept_when_asked(tiny_engine):
    _, engine = tiny_engine
    _, rows = rows_for(engine, strong_plan(engine).scaled(0), [8])
    last = rows.extend(*left_padded([IDS]), keep=1)
    assert last.shape[:2] == (1, 1)
    torch.testing.assert_close(last[0], engine.logits(IDS)[-1:], atol=1e-5, rtol=1e-5)
