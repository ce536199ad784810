"""A judge's ratings of an experiment's generations: kept with the judge, resumed, reported, and checked."""

import json

import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.engines.toy import ToyEngine
from steerlab.experiment.measurements.judgements import JudgedTexts

RUBRICS = {"kind": "After {prompt}: {text}\nKind? Rating:", "short": "{text}\nShort? Rating:"}
PROMPTS = ["the cat", "a dog"]


class Counting(ToyEngine):
    """A toy that counts what it is asked to score."""

    asked = 0

    def score(self, prompts, *args, **options):
        self.asked += len(prompts)
        return super().score(prompts, *args, **options)


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1), dose=1.0))


def generate(exp, plan, judge):
    return exp.generate(plan, PROMPTS, doses=[0, 0.3], n=2, max_new_tokens=4, judge=judge)


def test_ratings_are_kept_with_the_judge_and_not_asked_twice(tiny_llama_engine, plan, tmp_path):
    toy = Counting()
    judge = sl.judge(toy, RUBRICS)
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        rows = generate(exp, plan, judge)
        (found,) = exp.results.judgements
        assert toy.asked == len(rows) * 2
    direct = judge.rate(rows.text.tolist(), prompts=rows.prompt.tolist())
    assert rows.judge.to_numpy() == pytest.approx(direct.ratings)
    assert rows.judge_kind.to_numpy() == pytest.approx(direct.of("kind").expected)
    assert rows.judge_short_mass.to_numpy() == pytest.approx(direct.of("short").mass)
    assert isinstance(found, JudgedTexts)
    assert found.doses.rating.to_numpy() == pytest.approx(rows.groupby("dose").judge.mean())
    change = rows[rows.dose == 0.3].judge.to_numpy() - rows[rows.dose == 0].judge.to_numpy()
    assert found.doses.difference[1] == pytest.approx(change.mean())
    assert pd.isna(found.doses.difference[0])

    before = toy.asked
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as again:  # a second process would do this
        pd.testing.assert_frame_equal(generate(again, plan, judge), rows)
        assert toy.asked == before
        assert len(again.results.judgements) == 1
        checked = again.verify(n=100)
        assert checked.ok, str(checked)  # cells of the judge's model are not measured again on the run's
        report = again.report(tmp_path / "report.md").read_text()
    for words in ("Judged completions", "toy-0", RUBRICS["short"].split("\n")[1], judge.card.hash, "hardly answers"):
        assert words in report


def test_a_run_is_read_with_its_judge(tiny_llama_engine, plan, tmp_path):
    judge = sl.judge(tiny_llama_engine, RUBRICS["short"])  # the experiment's own model
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        rows = generate(exp, plan, judge)
        assert {"judge", "judge_entropy", "judge_mass"} <= set(rows.columns)
        assert exp.verify(n=100).ok
    (found,) = sl.Experiment.load(tmp_path / "run").results.judgements
    assert found.judge == judge.card
    assert found.judge.weights_hash == tiny_llama_engine.info.weights_hash


def test_a_changed_rating_is_noticed(tiny_llama_engine, plan, tmp_path):
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        generate(exp, plan, sl.judge(ToyEngine(), RUBRICS["short"]))
    path = tmp_path / "run" / "findings" / "judgement-000" / "doses.parquet"
    frame = pd.read_parquet(path)
    frame.assign(rating=frame.rating + 0.5).to_parquet(path)
    failures = sl.Experiment.load(tmp_path / "run").verify(n=0).failures
    assert "its means do not follow from its rows" in " ".join(failures.detail)


def test_two_judges_are_two_results(tiny_llama_engine, plan, tmp_path):
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        for rubric in RUBRICS.values():
            generate(exp, plan, sl.judge(ToyEngine(), rubric))
        assert [one.judge.rubrics["rubric"] for one in exp.results.judgements] == list(RUBRICS.values())
        assert len(exp.results.generations) == 2
        stated = json.loads((exp.path / "findings/judgement-001/finding.json").read_text())
        assert stated["judge"]["fields"]["rubrics"] == {"rubric": RUBRICS["short"]}
