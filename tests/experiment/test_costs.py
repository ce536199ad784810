import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.experiment.measurements.cost import generation_cost, perplexity_cost, perplexity_figures, perplexity_ratio
from steerlab.experiment.measurements.generations import generate_paired
from steerlab.experiment.measurements.texts import text_statistics

TEXTS = ["The ferry leaves the harbour at seven.", "A cat sat down.", "Nobody knew why the old clock had stopped."]


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), dose=1.0))


def test_figures_worked_by_hand():
    # text a: 3 tokens, +1 each; text b: 1 token, −1. Mean change (3 − 1)/4; without a −1, without b 1, so the standard
    # error is √(1/2 · (1 + 1)) = 1, times the 97.5 % point of Student's t with one degree of freedom
    base = [np.array([1.0, 2.0, 3.0]), np.array([4.0])]
    nlls = [np.array([2.0, 3.0, 4.0]), np.array([3.0])]
    nll, ppl, ratio, low, high, tokens, texts = perplexity_figures(nlls, base)
    assert (nll, ppl) == (3.0, pytest.approx(math.exp(3)))
    assert ratio == pytest.approx(math.exp(0.5)) == perplexity_ratio(nlls, base)
    assert (low, high) == (pytest.approx(math.exp(0.5 - 12.706205)), pytest.approx(math.exp(0.5 + 12.706205)))
    assert (tokens, texts) == (4, 2)


def test_one_text_has_no_interval_and_unequal_arms_are_refused():
    one = [np.array([1.0, 2.0])]
    assert all(math.isnan(end) for end in perplexity_figures(one, one)[3:5])
    with pytest.raises(InputError, match="same tokens"):
        perplexity_ratio(one, [np.array([1.0])])


@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=5), min_size=2, max_size=6), st.floats(-2, 2))
def test_a_uniform_change_is_known_exactly(nlls, shift):
    base = [np.array(text) for text in nlls]
    found = perplexity_figures([text + shift for text in base], base)
    assert found[2:5] == (pytest.approx(math.exp(shift)),) * 3


def test_ratios_are_those_of_exact_scores(tiny_llama_engine, plan):
    table = perplexity_cost(tiny_llama_engine, plan, TEXTS, [-0.3, 0, 0.3]).set_index("dose")
    sums = {}
    for dose in (0, 0.3):
        found = [sl.perplexity(tiny_llama_engine, text, plan=plan.scaled(dose)) for text in TEXTS]
        sums[dose] = sum(one.nll * one.num_tokens for one in found) / sum(one.num_tokens for one in found)
    assert table.nll[0.3] == pytest.approx(sums[0.3], abs=1e-5)
    assert table.ppl_ratio[0.3] == pytest.approx(math.exp(sums[0.3] - sums[0]), rel=1e-4)
    assert (table.loc[0, ["ppl_ratio", "ppl_ratio_low", "ppl_ratio_high"]] == 1).all()
    assert (table.ppl_ratio_low <= table.ppl_ratio).all()
    assert (table.ppl_ratio <= table.ppl_ratio_high).all()
    assert (table.num_texts == 3).all()


def test_generation_cost_describes_paired_completions(tiny_llama_engine, plan):
    options = {"policy": sl.SamplingPolicy(), "max_new_tokens": 8, "n": 2, "seed": 1}
    table = generation_cost(tiny_llama_engine, plan, ["The ferry", "A cat"], [0, 0.5], **options)
    rows = generate_paired(tiny_llama_engine, plan, ["The ferry", "A cat"], doses=[0, 0.5], **options)
    assert table.equals(text_statistics(rows))
    assert table.num_completions.tolist() == [4, 4]
