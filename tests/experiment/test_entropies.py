"""Entropies and divergences in both arms, against plain logits and scipy."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import steerlab as sl
from steerlab.core.errors import InputError, PlanError, PolicyError
from steerlab.experiment.measurements.entropy import entropy_by_text, entropy_change, entropy_summary

TEXTS = ["The ferry leaves the harbour at seven.", "A cat.", "Nobody knew why the old clock had stopped, nor when."]
POLICY = sl.SamplingPolicy(temperature=0.7, top_p=0.3)


@pytest.fixture(scope="module")
def plan(tiny_llama_engine):
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), dose=0.2))


@pytest.fixture(scope="module")
def rows(tiny_llama_engine, plan):
    return entropy_change(tiny_llama_engine, plan, TEXTS, POLICY)


@pytest.fixture(scope="module")
def distributions(tiny_llama_engine, plan):
    """Per text: token ids and the probabilities of every next token in both arms, one plain pass each, float64."""
    everywhere = sl.Plan(*(sl.add(edit.vector, dose=0.2, where=sl.where.all()) for edit in plan))
    found = []
    for text in TEXTS:
        ids = tiny_llama_engine.tokenizer(text)["input_ids"]
        arms = [tiny_llama_engine.logits(ids, plan=arm).double()[:-1] for arm in (None, everywhere)]
        found.append((ids[1:], *arms))
    return found


def test_a_row_per_token_but_the_first(rows, distributions):
    assert isinstance(rows.index, pd.RangeIndex)
    assert rows.groupby("text").size().tolist() == [len(ids) for ids, _, _ in distributions]
    assert rows[rows.text == 2].position.tolist() == list(range(1, 1 + len(distributions[2][0])))
    assert rows.token_id.tolist() == [token for ids, _, _ in distributions for token in ids]


def test_raw_figures_equal_scipy_on_plain_logits(rows, distributions):
    for text, (ids, base, steered) in enumerate(distributions):
        found = rows[rows.text == text]
        p, q = base.softmax(-1).numpy(), steered.softmax(-1).numpy()
        assert found.raw_base.to_numpy() == pytest.approx(scipy.stats.entropy(p, axis=-1), abs=1e-4)
        assert found.raw_steered.to_numpy() == pytest.approx(scipy.stats.entropy(q, axis=-1), abs=1e-4)
        assert found.kl.to_numpy() == pytest.approx(scipy.stats.entropy(q, p, axis=-1), abs=1e-4)  # steered first
        places = np.arange(len(ids))
        assert found.log_prob_base.to_numpy() == pytest.approx(np.log(p[places, ids]), abs=1e-4)
        assert found.log_prob_steered.to_numpy() == pytest.approx(np.log(q[places, ids]), abs=1e-4)


def nucleus_of(logits):
    """Ids whose predecessors in order of probability hold less than top_p, and their renormalised probabilities."""
    p = (logits / POLICY.temperature).softmax(-1).numpy()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    ids = order[before < POLICY.top_p - 1e-9]
    return {int(i): p[i] / p[ids].sum() for i in ids}


def test_policy_figures_equal_a_count_by_hand(rows, distributions):
    seen_infinite = 0
    for row, (base, steered) in zip(
        rows.itertuples(), [pair for _, a, b in distributions for pair in zip(a, b, strict=True)], strict=True
    ):
        p, q = nucleus_of(base), nucleus_of(steered)
        assert row.base == pytest.approx(scipy.stats.entropy(list(p.values())), abs=1e-4)
        assert row.steered == pytest.approx(scipy.stats.entropy(list(q.values())), abs=1e-4)
        assert row.kept == pytest.approx(len(p.keys() & q.keys()) / len(p), abs=1e-6)
        assert row.jaccard == pytest.approx(len(p.keys() & q.keys()) / len(p.keys() | q.keys()), abs=1e-6)
        inside = q.keys() <= p.keys()
        expected = sum(q[i] * math.log(q[i] / p[i]) for i in q) if inside else math.inf
        assert row.policy_kl == pytest.approx(expected, abs=1e-3)
        seen_infinite += not inside
    assert 0 < seen_infinite < len(rows)  # both branches ran


def test_no_plan_and_dose_zero_change_nothing(tiny_llama_engine, plan):
    for none in (None, plan.scaled(0)):
        rows = entropy_change(tiny_llama_engine, none, TEXTS, POLICY)
        assert (rows.base == rows.steered).all()
        assert (rows.kl == 0).all()
        assert (rows.policy_kl == 0).all()
        assert (rows.jaccard == 1).all()


def test_a_greedy_policy_is_a_point_mass(tiny_llama_engine, plan):
    rows = entropy_change(tiny_llama_engine, plan, TEXTS, sl.SamplingPolicy.greedy())
    assert (rows[["base", "steered"]] == 0).all().all()
    assert set(rows.jaccard) == {0.0, 1.0}
    assert (rows.policy_kl == np.where(rows.jaccard == 1, 0, math.inf)).all()


@pytest.mark.parametrize("rows_at_once", [3, 20])
def test_memory_budget_changes_no_figure(tiny_llama_engine, plan, rows, rows_at_once):
    budget = 2 * 4 * tiny_llama_engine.info.d_vocab * rows_at_once
    small = entropy_change(tiny_llama_engine, plan, TEXTS, POLICY, logit_bytes=budget)
    assert small[["text", "position", "token_id"]].equals(rows[["text", "position", "token_id"]])
    for name in ("base", "steered", "raw_base", "raw_steered", "kl", "kept", "jaccard", "log_prob_steered"):
        assert small[name].to_numpy() == pytest.approx(rows[name].to_numpy(), abs=1e-4)


def test_no_call_keeps_more_rows_than_the_budget(tiny_llama_engine, plan, monkeypatch):
    from steerlab.experiment.measurements import entropy as entropies

    kept = []
    plain = entropies._KeptRows.of

    def counted(self, numbers):
        kept.append(sum(len(part) for part in self.parts))
        return plain(self, numbers)

    monkeypatch.setattr(entropies._KeptRows, "of", counted)
    entropy_change(tiny_llama_engine, plan, TEXTS, POLICY, logit_bytes=2 * 4 * 5 * tiny_llama_engine.info.d_vocab)
    assert max(kept) == 5


def test_texts_longer_than_the_context(tiny_llama_engine, plan):
    text = [" the cat ran home" * 120]
    rows = entropy_change(tiny_llama_engine, plan, text, POLICY)
    ids = tiny_llama_engine.tokenizer(text[0])["input_ids"]
    assert len(ids) > tiny_llama_engine.info.context_length
    assert rows.position.tolist() == list(range(1, len(ids)))
    assert rows.token_id.tolist() == ids[1:]
    first = sl.Plan(*(sl.add(edit.vector, dose=0.2, where=sl.where.generated(after=5)) for edit in plan))
    with pytest.raises(PlanError, match="windows"):
        entropy_change(tiny_llama_engine, first, text, POLICY)


def test_what_cannot_be_measured_is_refused(tiny_llama_engine, plan):
    with pytest.raises(PolicyError, match="repetition_penalty"):
        entropy_change(tiny_llama_engine, plan, TEXTS, sl.SamplingPolicy(repetition_penalty=1.2))
    with pytest.raises(InputError, match="logit_bytes is 100"):
        entropy_change(tiny_llama_engine, plan, TEXTS, POLICY, logit_bytes=100)


# --- summaries ----------------------------------------------------------------------------------------------------


def made_up() -> pd.DataFrame:
    figures = {
        "text": [0, 0, 1, 1],
        "base": [1.0, 2.0, 3.0, 4.0],
        "steered": [2.0, 2.0, 3.0, 2.0],
        "policy_kl": [0.5, math.inf, 0.1, 0.3],
        "kl": [0.1, 0.2, 0.3, 0.4],
    }
    same = {name: [1.0] * 4 for name in ("raw_base", "raw_steered", "kept", "jaccard")}
    return pd.DataFrame(figures | same)


def test_means_by_text_worked_by_hand():
    table = entropy_by_text(made_up())
    assert table.num_tokens.tolist() == [2, 2]
    assert table.change.tolist() == [0.5, -1.0]
    assert table.policy_kl.tolist() == [math.inf, pytest.approx(0.2)]
    assert table.policy_kl_infinite.tolist() == [0.5, 0.0]
    assert table.policy_kl_finite.tolist() == [0.5, pytest.approx(0.2)]


def test_summary_is_over_texts():
    table = entropy_summary(made_up()).set_index("quantity")
    change = table.loc["change"]
    assert change["mean"] == -0.25
    # without a text −1 and 0.5, so the standard error is 0.75, times Student's t with one degree of freedom
    assert (change.low, change.high) == pytest.approx((-0.25 - 0.75 * 12.706205, -0.25 + 0.75 * 12.706205))
    assert (change.num_tokens, change.num_texts) == (4, 2)
    assert table.loc["policy_kl", "mean"] == math.inf
    assert math.isnan(table.loc["policy_kl", "low"])
    assert table.loc["policy_kl_finite", "num_tokens"] == 3
    assert table.loc["policy_kl_finite", "mean"] == pytest.approx(0.3)
    assert table.loc["policy_kl_infinite", "mean"] == 0.25


def test_one_text_has_no_interval(rows):
    alone = entropy_summary(rows[rows.text == 0]).set_index("quantity")
    assert alone[["low", "high"]].isna().all().all()
    together = entropy_summary(rows).set_index("quantity")
    assert (together.low <= together["mean"]).drop(["policy_kl"]).all()
