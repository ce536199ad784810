"""AxBench's steering task on tiny models: vectors by formula, factors from one half, scores on the other."""

import numpy as np
import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.protocols import Concept, axbench, read_concepts, read_instructions
from steerlab.protocols.axbench import PARTS, _sentences, method_differences, rubrics, summary_table

pytestmark = pytest.mark.filterwarnings("ignore:reft_r1. the held-out loss is")  # four steps teach little

INSTRUCTIONS = ["Where is the cat?", "Who came back?", "What is four?", "Why is it warm?"]
FACTORS = [0.5, 1.0]
TRAINING = {"steps": 4, "evaluate_every": 2, "learning_rate": 0.3, "validation": 0.3}
OPTIONS = {"layer": 1, "factors": FACTORS, "max_new_tokens": 4, "training": TRAINING}
W = sl.where.all() & ~sl.where.index(0)


def concept(name, word):
    asked = ["Where?", "Who?", "Why?", "What now?"]
    return Concept(
        name,
        tuple((one, f"{word} {word} day") for one in asked),
        tuple((one, "the bread was stale") for one in asked),
    )


CONCEPTS = [concept("joy", "happy"), concept("sea", "ferry")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(tiny_llama_engine, folder):
    exp = sl.Experiment("axbench", tiny_llama_engine, root=folder, seed=3)
    return axbench(exp, CONCEPTS, INSTRUCTIONS, **OPTIONS), exp


def test_table_from_rows(found):
    result, _ = found
    assert result.table.method.tolist() == ["prompting", "diff_mean", "pca", "random", "reft_r1"]
    assert len(result.rows) == 2 * 4 * (1 + 4 * 2)
    for row in result.table.itertuples():
        scores, factors = [], []
        for name in ("joy", "sea"):
            part = result.rows[(result.rows.method == row.method) & (result.rows.concept_name == name)]
            means = part[part.instruction_index < 2].groupby("factor").score.mean()
            best = means.idxmax()
            factors.append(best)
            chosen = part[(part.instruction_index >= 2) & (part.factor == best)]
            assert chosen.chosen.all()
            scores += chosen.score.tolist()
        assert row.score == pytest.approx(np.mean(scores))
        assert row.score_low <= row.score <= row.score_high
        assert np.isnan(row.factor) if row.method == "prompting" else row.factor == pytest.approx(np.mean(factors))
    assert result.rows.score.between(0, 2).all()
    assert not result.rows[list(PARTS)].isna().any().any()


def test_vectors_by_formula(found, tiny_llama_engine):
    _, exp = found
    vectors = {(v.name, v.card.method): v for s in exp.results.vectors for v in s.values()}
    assert len(vectors) == 8
    positive, negative = (
        tiny_llama_engine.capture([f"{a}\n{b}" for a, b in side], layers=[1], where=W)[1].double()
        for side in (CONCEPTS[0].positives, CONCEPTS[0].negatives)
    )
    difference = positive.mean(0) - negative.mean(0)
    principal = torch.linalg.svd(positive - positive.mean(0)).Vh[0]
    for method, direction in (("diff_mean", difference), ("pca", principal)):
        v = vectors["joy", f"axbench {method}"]
        assert abs(float(v.unit.double() @ direction / direction.norm())) == pytest.approx(1, abs=1e-5)
        assert float(v.unit.double() @ difference) >= 0
        assert v.norm == pytest.approx(float((positive @ v.unit.double()).max()), rel=1e-5)
    learned = vectors["joy", "reft_r1"]
    assert learned.norm == pytest.approx(learned.card.training["max_activation"], rel=1e-5)


def test_ratings_are_the_judges(found, tiny_llama_engine):
    result, _ = found
    row = result.rows[(result.rows.method == "diff_mean") & (result.rows.factor == 1.0)].iloc[1]
    judge = sl.judge(tiny_llama_engine, rubrics(row.concept_name))
    said = judge.rate([row.text], prompts=[INSTRUCTIONS[row.instruction_index]])
    assert row.score == pytest.approx(said.ratings[0], abs=1e-5)
    assert row.concept == pytest.approx(said.of("concept").expected[0], abs=1e-5)


def test_a_run_goes_on_where_it_stopped(found, tiny_llama_engine, folder, tmp_path, monkeypatch):
    result, _ = found

    class Stopped(Exception):
        pass

    calls = []

    def stopping(real, limit):
        def call(self, *arguments, **options):
            calls.append(1)
            if len(calls) > limit:
                raise Stopped
            return real(self, *arguments, **options)

        return call

    kind = type(tiny_llama_engine)
    broken = sl.Experiment("axbench", tiny_llama_engine, root=tmp_path, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "generate", stopping(kind.generate, 6))
        with pytest.raises(Stopped):
            axbench(broken, CONCEPTS, INSTRUCTIONS, **OPTIONS)
    again = axbench(
        sl.Experiment("axbench", tiny_llama_engine, root=tmp_path, seed=3), CONCEPTS, INSTRUCTIONS, **OPTIONS
    )
    pd.testing.assert_frame_equal(again.table, result.table, rtol=1e-4)
    with monkeypatch.context() as patch:  # all is there: nothing runs
        for name in ("generate", "score", "capture", "added_vector_scores"):
            patch.setattr(kind, name, stopping(getattr(kind, name), -1))
        loaded = sl.Experiment("axbench", tiny_llama_engine, root=tmp_path, seed=3)
        repeated = axbench(loaded, CONCEPTS, INSTRUCTIONS, **OPTIONS)
    pd.testing.assert_frame_equal(repeated.table, again.table)


def test_files_of_the_benchmark(tmp_path):
    rows = [
        {"input": f"ask {k}", "output": text, "output_concept": name, "concept_genre": genre, "category": category,
         "dataset_category": "instruction", "concept_id": number}
        for k in range(3)
        for text, name, genre, category, number in (
            ("wet", "rain", "text", "positive", 0),
            ("x = 1", "code", "code", "positive", 1),
            ("well", "EEEEE", "text", "negative", -1),
            ("y = 2", "EEEEE", "code", "negative", -1),
        )
    ]  # fmt: skip
    path = tmp_path / "train_data.parquet"
    pd.DataFrame(rows).to_parquet(path)
    rain, code = read_concepts(path)
    assert (rain.name, rain.positives[0], rain.negatives[0]) == ("rain", ("ask 0", "wet"), ("ask 0", "well"))
    assert {text for _, text in code.negatives} == {"y = 2"}
    assert [one.name for one in read_concepts(path, named=["code"], texts=2)] == ["code"]
    assert read_instructions(path, limit=3) == ["ask 0", "ask 1", "ask 2"]
    with pytest.raises(DataError, match="3 instructions without a concept; 4 are wanted"):
        read_instructions(path, limit=4)
    with pytest.raises(DataError, match="holds no concept named"):
        read_concepts(path, named=["sun"])
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(DataError, match="lacks the columns input, output"):
        read_concepts(path)
    path.write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as a parquet file"):
        read_concepts(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ["sae"]}, "methods are some of"),
        ({"factors": [0.0, 1.0]}, "factors are distinct finite numbers > 0"),
        ({"layer": "all"}, "steers one layer"),
    ],
)
def test_arguments_that_cannot_be_used(tiny_llama_engine, changed, message):
    exp = sl.Experiment("axbench", tiny_llama_engine, root=None)
    with pytest.raises(InputError, match=message):
        axbench(exp, CONCEPTS, INSTRUCTIONS, **{**OPTIONS, **changed})
    with pytest.raises(InputError, match="two or more texts"):
        axbench(exp, CONCEPTS, ["one"], **OPTIONS)
    with pytest.raises(InputError, match="list of Concepts"):
        axbench(exp, [], INSTRUCTIONS, **OPTIONS)
    with pytest.raises(DataError, match="at least one"):
        Concept("joy", (), (("a", "b"),))


def test_random_directions_differ_between_concepts(found):
    _, exp = found
    drawn = [v for s in exp.results.vectors for v in s.values() if v.card.method == "axbench random"]
    assert [v.name for v in drawn] == ["joy", "sea"]
    assert abs(float(drawn[0].unit @ drawn[1].unit)) < 0.9


def rated(scores):
    """Rows of two methods on as many concepts as there are pairs of scores, two answers each."""
    rows = [
        {"method": method, "concept_name": str(k), "score": score + shift, "mass": 1.0, "factor": 1.0}
        for k, pair in enumerate(scores)
        for method, score in zip(("diff_mean", "random"), pair, strict=True)
        for shift in (-0.1, 0.1)
    ]
    return pd.DataFrame(rows).assign(chosen=True, half="report", **dict.fromkeys(PARTS, 1.0))


def test_methods_are_compared_on_the_same_concepts():
    (found,) = method_differences(rated([(1.0, 0.5), (1.5, 0.9), (0.4, 0.1)]), ["diff_mean", "random"]).itertuples()
    away = np.array([0.5, 0.6, 0.3])
    reach = 4.302653 * away.std(ddof=1) / 3**0.5  # the 97.5 % point of Student's t with two degrees of freedom
    assert (found.method, found.other, found.concepts) == ("diff_mean", "random", 3)
    assert found.difference == pytest.approx(away.mean())
    assert (found.low, found.high) == pytest.approx((away.mean() - reach, away.mean() + reach))
    alone = method_differences(rated([(1.0, 0.5)]), ["diff_mean", "random"])
    assert alone[["low", "high"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ([(1.0, 0.5), (1.1, 0.55)], ["Mean score from 0 to 2: diff_mean 1.05 [0.41, 1.69], random 0.53 [0.21, 0.84]."]),
        ([(1.0, 0.5)], ["Mean score from 0 to 2: diff_mean 1.00, random 0.50.", "is not shown by 1 concept."]),
    ],
)
def test_what_is_not_shown_is_said(scores, told):
    rows = rated(scores)
    found = _sentences(summary_table(rows, ["diff_mean", "random"]), rows)
    assert len(found) == len(told)
    assert all(part in sentence for part, sentence in zip(told, found, strict=True))
