import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import steerlab as sl
from steerlab.core.errors import InputError, PlanError
from steerlab.experiment.measurements.interaction import combined, interaction

TARGETS = sl.Targets.from_records(
    [
        {"prompt": prompt, "target": target, "label": label}
        for prompt in ("the cat", "a dog", "the bird", "a fish")
        for target, label in [(" ran", 1), (" flew off", -1)]
    ]
)


def vector(layer, seed):
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=layer)


A, B = sl.Plan(sl.add(vector(1, 0), dose=0.4)), sl.Plan(sl.add(vector(2, 1), dose=0.4))


@pytest.fixture(scope="module")
def found(tiny_llama_engine):
    return interaction(tiny_llama_engine, A, B, TARGETS, scales_a=[0, 1, 2], scales_b=[-1, 0])


def margin(engine, plan):
    scores = engine.score(TARGETS.prompts, [item.targets for item in TARGETS], plan=plan).log_prob
    return scores[0::2] - scores[1::2]


def test_cells_are_both_plans_together(found, tiny_llama_engine):
    assert isinstance(found.rows.index, pd.RangeIndex)
    assert len(found.rows) == 4 * 3 * 2
    cell = found.rows.query("scale_a == 2 and scale_b == -1")
    both = sl.Plan(*A.scaled(2), *B.scaled(-1))
    expected = margin(tiny_llama_engine, both)
    base = margin(tiny_llama_engine, None)
    assert cell.value.to_numpy() == pytest.approx(expected, abs=1e-5)
    alone = margin(tiny_llama_engine, A.scaled(2)) + margin(tiny_llama_engine, B.scaled(-1)) - base
    assert cell.interaction.to_numpy() == pytest.approx(expected - alone, abs=1e-4)
    row = found.table.query("scale_a == 2 and scale_b == -1").iloc[0]
    assert row.plan_hash == both.hash
    assert row.interaction == pytest.approx((expected - alone).mean(), abs=1e-4)
    assert row.expected == pytest.approx((alone - base).mean(), abs=1e-4)
    assert row.change == pytest.approx(row.expected + row.interaction)
    assert row.low <= row.interaction <= row.high


def test_the_margins_of_the_grid_are_the_single_plans(found):
    grid = found.grid()
    assert grid.index.tolist() == [0, 1, 2]
    assert grid.columns.tolist() == [-1, 0]
    assert (grid.loc[0] == 0).all()
    assert (grid[0.0] == 0).all()
    edge = found.table[(found.table.scale_a == 0) | (found.table.scale_b == 0)]
    assert edge[["low", "high"]].isna().all().all()
    assert found.grid("change").loc[0, 0] == 0
    assert "2 × a and -1 × b" in str(found)


def test_a_metric_that_ignores_the_model_has_no_interaction(tiny_llama_engine):
    found = interaction(tiny_llama_engine, A, B, TARGETS, metric=lambda positive, negative: 1.0)
    assert (found.table.interaction == 0).all()
    assert (found.table.low.dropna() == 0).all()


def test_interval_agrees_with_student_for_many_items(monkeypatch):
    """Made-up values with a known interaction of 0.5 ± 1 per item."""
    from steerlab.experiment.measurements import interaction as module

    rng = np.random.default_rng(0)
    records = [{"prompt": f"p{i}", "target": t, "label": lab} for i in range(300) for t, lab in [("x", 1), ("y", -1)]]
    many = sl.Targets.from_records(records)
    extra = rng.normal(0.5, 1, 300)

    def made_up(engine, plans, on, metric):
        sizes = [len(plan) if plan is not None else 0 for plan in plans]
        return np.array([np.full(300, float(n)) + (extra if n == 2 else 0) for n in sizes])

    monkeypatch.setattr(module, "item_values", made_up)
    found = interaction(None, A, B, many)
    row = found.table.query("scale_a == 1 and scale_b == 1").iloc[0]
    expected = stats.ttest_1samp(extra, 0).confidence_interval()
    assert row.interaction == pytest.approx(extra.mean())
    assert (row.low, row.high) == (pytest.approx(expected.low, abs=0.02), pytest.approx(expected.high, abs=0.02))


def test_combined_leaves_out_what_is_at_scale_zero():
    assert combined(A, 0, B, 0) is None
    assert combined(A, 2, B, 0) == A.scaled(2)
    assert combined(A, 1, B, -1) == A + B.scaled(-1)


def test_grids_without_a_baseline_and_contradicting_plans_are_refused(tiny_llama_engine):
    for scales in ([1, 2], [0], [0, 1, 1]):
        with pytest.raises(InputError, match="scales_b"):
            interaction(tiny_llama_engine, A, B, TARGETS, scales_b=scales)
    fixed = [sl.Plan(sl.set(vector(1, 0), value)) for value in (1.0, 2.0)]
    with pytest.raises(PlanError):
        interaction(tiny_llama_engine, *fixed, TARGETS)
