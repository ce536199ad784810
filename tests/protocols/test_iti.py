"""Inference-time intervention on a tiny model: scores, shifts and cost again from the engine's own figures."""

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.protocols import TruthQuestions, iti
from steerlab.protocols.iti import multiple_choice
from tests.protocols.data import THINGS, TRUTH

TEXTS = ["the street was quiet and warm", "the bread was stale"]
OPTIONS = {"heads": [1, 3], "alphas": [2.0, 8.0], "folds": 3, "texts": TEXTS}


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine, tmp_path_factory):
    return sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=4)


@pytest.fixture(scope="module")
def found(experiment):
    return iti(experiment, TRUTH, **OPTIONS)


def test_scores_of_a_question_by_hand():
    assert multiple_choice(np.log([0.4, 0.1, 0.3, 0.2]), 2) == (1.0, pytest.approx(0.5))
    assert multiple_choice(np.log([0.1, 0.6, 0.2]), 2) == (0.0, pytest.approx(7 / 9))  # the best answer alone counts
    assert multiple_choice(np.array([-900.0, -902.0]), 1) == (1.0, pytest.approx(1 / (1 + np.exp(-2))))


def steered(engine, fit, k, alpha):
    """z of the k best heads shifted by hand: one addition per head, none of them joined."""
    pairs = fit.pairs(chat=False)
    ranking = sl.rank_heads(engine, pairs, folds=3)
    options, edits = {"site": "z", "where": sl.where.last_prompt(), "pool": "last"}, []
    for layer, head in ranking.best(k):
        read = [engine.capture(list(one), layers=[layer], **options) for one in (pairs.positives, pairs.negatives)]
        sides = [one[layer][:, head] for one in read]
        direction = sides[0].mean(0) - sides[1].mean(0)
        direction = direction / direction.norm()
        spread = (torch.cat(sides) @ direction).std(correction=0)
        edits.append(sl.add(sl.head_vector(engine, layer, head, alpha * spread * direction), coef=1.0))
    return sl.Plan(*edits)


@pytest.mark.parametrize(("half", "k", "alpha"), [(0, 3, 8.0), (1, 1, 2.0)])
def test_rows_by_hand(found, tiny_llama_engine, half, k, alpha):
    halves = TRUTH.halves(seed=4)
    fit, measured = halves[half], halves[1 - half]
    plan = steered(tiny_llama_engine, fit, k, alpha)
    rows = found.rows[(found.rows.half == half) & (found.rows["heads"] == k) & (found.rows.alpha == alpha)]
    assert rows.question.tolist() == [item.question for item in measured]
    for item, row in zip(measured, rows.itertuples(), strict=True):
        p = [
            np.exp(tiny_llama_engine.score([f"Q: {item.question}\nA:"], [[f" {one}"]], plan=plan)[0].log_prob)
            for one in (*item.true, *item.false)
        ]
        assert row.mc1 == float(p[0] > max(p[len(item.true) :]))
        assert row.mc2 == pytest.approx(sum(p[: len(item.true)]) / sum(p), abs=1e-3)


def test_the_table_is_made_of_the_rows(found):
    table = found.table
    keys = [(0, 0.0), (1, 2.0), (1, 8.0), (3, 2.0), (3, 8.0)]
    assert list(zip(table["heads"], table.alpha, strict=True)) == keys
    assert (table["items"] == len(TRUTH)).all()  # every question once
    means = found.rows.groupby(["heads", "alpha"])[["mc1", "mc2"]].mean()
    for row in table.itertuples():
        assert (row.mc1, row.mc2) == pytest.approx(tuple(means.loc[row.heads, row.alpha]))
        assert row.mc2_change == pytest.approx(row.mc2 - table.mc2[0])
        assert row.mc2_change_low <= row.mc2_change <= row.mc2_change_high
    assert (table.kl[0], table.ppl_ratio[0], table.mc2_change[0]) == (0, 1, 0)
    assert (table.kl[1:] > 0).all()
    assert table.kl[4] > table.kl[3]  # a stronger shift moves the distribution further


def test_cost_by_hand(found, tiny_llama_engine):
    halves = TRUTH.halves(seed=4)
    plans = [steered(tiny_llama_engine, fit, 3, 8.0) for fit in halves]
    costs = [[sl.perplexity(tiny_llama_engine, text, plan=plan) for text in TEXTS] for plan in plans]
    tokens = sum(one.num_tokens for one in costs[0])
    ce = np.mean([sum(one.nll * one.num_tokens for one in own) / tokens for own in costs])
    assert found.table.ce[4] == pytest.approx(ce, rel=1e-4)
    assert found.table.ppl_ratio[4] == pytest.approx(np.exp(ce - found.table.ce[0]), rel=1e-4)


def test_it_resumes_and_is_reported(experiment, found, tiny_llama_engine, tmp_path, monkeypatch):
    experiment.close()
    for name in ("score", "capture", "measure", "head_outputs"):
        monkeypatch.setattr(type(tiny_llama_engine), name, lambda *_, **__: pytest.fail("it ran again"))
    again = sl.Experiment("run", tiny_llama_engine, root=experiment.path.parent, seed=4)
    assert iti(again, TRUTH, **OPTIONS).table.equals(found.table)
    assert again._session.cells.measured == 0
    report = again.report(tmp_path / "report.md").read_text()
    assert "Protocol: iti" in report
    assert "Li et al. 2023" in report
    monkeypatch.undo()
    assert again.verify(n=100).ok
    again.close()


def test_questions_in_the_benchmarks_form(tmp_path):
    row = {"question": "Is it?", "mc1_targets": {"No": 1, "Yes": 0}, "mc2_targets": {"Not so": 1, "No": 1, "Yes": 0}}
    (item,) = TruthQuestions.from_records([row])
    assert (item.true, item.false) == (("No", "Not so"), ("Yes",))
    assert item.prompt(chat=True, before="Say: ") == [{"role": "user", "content": "Say: Is it?"}]
    assert item.answered("No", chat=True)[-1] == {"role": "assistant", "content": "No"}
    (pair,) = TruthQuestions((item,)).pairs(chat=False)
    assert pair == ("Q: Is it?\nA: No", "Q: Is it?\nA: Yes")
    path = tmp_path / "mc.json"
    path.write_text('[{"question": "Is it?", "mc2_targets": {"No": 1, "Yes": 2}}]')
    with pytest.raises(DataError, match=r"mc.json.*answers with 1 or 0, at least one of each"):
        TruthQuestions.from_jsonl(path)
    with pytest.raises(DataError, match="needs question, a text, and mc2_targets"):
        TruthQuestions.from_records([{"question": "Is it?"}])
    with pytest.raises(DataError, match="is one of those of mc2_targets"):
        TruthQuestions.from_records([{**row, "mc1_targets": {"Perhaps": 1}}])
    with pytest.raises(DataError, match="stands twice"):
        TruthQuestions((item, item))


def test_bad_arguments_are_refused(experiment, tiny_llama_engine, monkeypatch):
    exp = sl.Experiment("bad", tiny_llama_engine, root=None)
    with pytest.raises(InputError, match="questions are TruthQuestions"):
        iti(exp, THINGS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="12 questions are too few: a half of them is divided into 7"):
        iti(exp, TRUTH, **{**OPTIONS, "folds": 7})
    with pytest.raises(InputError, match="heads are distinct"):
        iti(exp, TRUTH, **{**OPTIONS, "heads": [2, 2]})
    with pytest.raises(InputError, match="alphas are distinct"):
        iti(exp, TRUTH, **{**OPTIONS, "alphas": [0.0]})
    monkeypatch.setattr(type(tiny_llama_engine), "capture", lambda *_, **__: pytest.fail("it ranked all the same"))
    with pytest.raises(InputError, match=r"heads asks for 9 heads, and there are 8 in the layers \[0, 3\]"):
        iti(exp, TRUTH, **{**OPTIONS, "heads": [2, 9], "layers": [0, 3]})
