import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.experiment.measurements.generations import generate_paired
from steerlab.experiment.measurements.pairing import paired_differences, side_by_side

PROMPTS = ["The ferry", "She opened the window"]
POLICY = sl.SamplingPolicy(temperature=0.8, top_p=0.9)


@pytest.fixture(scope="module")
def plan(tiny_llama_engine):
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), dose=1.0))


@pytest.fixture(scope="module")
def rows(tiny_llama_engine, plan):
    return generate_paired(
        tiny_llama_engine, plan, PROMPTS, doses=[0.5, 0, -0.5], policy=POLICY, max_new_tokens=6, n=2, seed=4
    )


def test_a_row_per_prompt_sample_and_dose(rows, plan):
    assert isinstance(rows.index, pd.RangeIndex)
    assert rows.dose.tolist() == [-0.5, 0.0, 0.5] * 4
    assert rows.prompt.tolist() == [PROMPTS[0]] * 6 + [PROMPTS[1]] * 6
    assert (rows.plan_hash == plan.hash).all()
    assert (rows.token_ids.map(len) == rows.num_tokens).all()
    steered = rows[rows.dose != 0]
    assert (steered.edited_tokens == steered.num_tokens).all()  # the last prompt token and all that are fed back
    assert (rows[rows.dose == 0].edited_tokens == 0).all()


def test_each_dose_draws_what_it_would_alone(rows, tiny_llama_engine, plan):
    for dose in (0.0, 0.5):
        alone = tiny_llama_engine.generate(
            PROMPTS, plan=plan.scaled(dose), policy=POLICY, max_new_tokens=6, n=2, seed=4
        )
        assert rows[rows.dose == dose].text.tolist() == alone.texts


def test_side_by_side_has_a_column_per_dose(rows):
    wide = side_by_side(rows)
    assert list(wide.columns) == ["prompt_index", "sample_index", "prompt", "-0.5", "0", "0.5"]
    assert wide.prompt.tolist() == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    assert wide["0.5"].tolist() == rows[rows.dose == 0.5].text.tolist()
    assert side_by_side(rows, "num_tokens")["0"].tolist() == rows[rows.dose == 0].num_tokens.tolist()


def test_rows_survive_parquet(rows, tmp_path):
    rows.to_parquet(tmp_path / "rows.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "rows.parquet"), rows)


def test_bad_doses_are_refused(tiny_llama_engine, plan):
    for doses in ([], [0.1, 0.1]):
        with pytest.raises(InputError, match="dose"):
            generate_paired(tiny_llama_engine, plan, PROMPTS, doses=doses, policy=POLICY)


# --- differences ---------------------------------------------------------------------------------------------------


def figures(base, steered, prompts):
    """Made-up rows of a figure at doses 0 and 1, samples numbered within their prompt."""
    samples = pd.Series(prompts).groupby(prompts).cumcount().tolist()
    part = {"prompt_index": prompts, "sample_index": samples}
    frames = [pd.DataFrame({**part, "dose": dose, "figure": values}) for dose, values in ((0.0, base), (1.0, steered))]
    return pd.concat(frames, ignore_index=True)


def test_worked_by_hand():
    # prompt 0: changes 1 and 3; prompt 1: change −2. Mean 2/3; without a prompt −2 and 2, so the standard error is 2,
    # times the 97.5 % point of Student's t with one degree of freedom
    (found,) = paired_differences(figures([1, 1, 5], [2, 4, 3], [0, 0, 1]), "figure")
    assert (found.base_mean, found.mean) == (pytest.approx(7 / 3), 3.0)
    assert found.difference == pytest.approx(2 / 3)
    assert (found.low, found.high) == pytest.approx((2 / 3 - 2 * 12.706205, 2 / 3 + 2 * 12.706205))
    assert (found.num_pairs, found.num_missing, found.num_prompts) == (3, 0, 2)


def test_a_pair_with_a_missing_side_is_left_out_and_counted():
    (found,) = paired_differences(figures([1, math.nan, 5], [2, 4, 3], [0, 0, 1]), "figure")
    assert (found.num_pairs, found.num_missing) == (2, 1)
    assert found.difference == pytest.approx(-0.5)
    assert found.base_mean == 3
    (nothing,) = paired_differences(figures([math.nan], [1.0], [0]), "figure")
    assert math.isnan(nothing.difference)
    assert math.isnan(nothing.low)


def test_interval_agrees_with_student_for_one_sample_a_prompt():
    rng = np.random.default_rng(0)
    base = rng.normal(size=200)
    change = rng.normal(0.3, 1, size=200)
    (found,) = paired_differences(figures(base, base + change, list(range(200))), "figure")
    expected = stats.ttest_rel(base + change, base).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_samples_of_one_prompt_are_not_independent():
    rng = np.random.default_rng(1)
    per_prompt = rng.normal(size=20)
    change, prompts = np.repeat(per_prompt, 30), np.repeat(np.arange(20), 30).tolist()
    (found,) = paired_differences(figures(np.zeros(600), change, prompts), "figure")
    expected = 2 * 2.093024 * per_prompt.std(ddof=1) / math.sqrt(20)
    assert found.high - found.low == pytest.approx(expected)  # as wide as 20 prompts give, not 600 samples


def test_rows_that_cannot_be_paired_are_refused():
    rows = figures([1, 2], [3, 4], [0, 1])
    with pytest.raises(DataError, match="exactly one completion at each dose"):
        paired_differences(rows.iloc[:-1], "figure")
    with pytest.raises(DataError, match=r"no completions at dose 0\.3"):
        paired_differences(rows, "figure", base_dose=0.3)
    with pytest.raises(DataError, match="lacks \\['score'\\]"):
        paired_differences(rows, "score")
