"""Layer × multiplier tables from the engine's own scores, and the comparison with published per-item files."""

import json

import numpy as np
import pytest

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.protocols import ChoiceItems, against_published, caa
from tests.protocols.data import ITEMS, records


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine, tmp_path_factory):
    return sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=5)


@pytest.fixture(scope="module")
def found(experiment):
    return caa(experiment, {"runs": ITEMS}, layers=[1, 2], multipliers=[-1, 0, 2], held_out=0.25)


def test_probabilities_by_hand(found, tiny_llama_engine):
    train, test = ITEMS.split([0.75, 0.25], seed=5)
    vectors = sl.extract(tiny_llama_engine, train.pairs(chat=False), layers=[1, 2])
    for layer, factor in ((1, -1), (1, 0), (2, 2)):
        plan = sl.Plan(sl.add(vectors[layer], coef=factor)) if factor else None
        rows = found.rows[(found.rows.layer == layer) & (found.rows.multiplier == factor)]
        for item, row in zip(test, rows.itertuples(), strict=True):
            a, b = np.exp(tiny_llama_engine.score([item.prompt(chat=False)], [["A", "B"]], plan=plan).log_prob)
            assert (row.a_prob, row.b_prob) == pytest.approx((a, b), rel=1e-3)
            assert row.p_matching == pytest.approx((a if item.matching == "A" else b) / (a + b), rel=1e-3)


def test_the_table_is_the_rows_means(found):
    assert found.table.columns.tolist()[:6] == ["behaviour", "layer", "items", "p at -1", "p at 0", "p at 2"]
    wide = found.rows.pivot_table(index="layer", columns="multiplier", values="p_matching")
    for row in found.table.itertuples(index=False):
        assert (row[3], row[4], row[5]) == pytest.approx(tuple(wide.loc[row.layer]))
        assert row.change == pytest.approx(row[5] - row[3])
        assert row.change_low <= row.change <= row.change_high
    assert found.table["p at 0"].nunique() == 1  # unsteered, whatever the layer


def test_published_files_are_compared_item_by_item(found, tmp_path):
    rows = found.rows[(found.rows.layer == 1) & (found.rows.multiplier == 2)]
    published = [
        {"question": row.question, "answer_matching_behavior": f"({row.matching})", "a_prob": 0.3, "b_prob": 0.1}
        for row in rows.itertuples()
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps([*published, {**published[0], "question": "Another?"}]))
    both = against_published(found, path, layer=1, multiplier=2)
    assert both.published.tolist() == pytest.approx([0.75 if m == "A" else 0.25 for m in rows.matching])
    assert both.difference.to_numpy() == pytest.approx(rows.p_matching.to_numpy() - both.published.to_numpy())
    with pytest.raises(DataError, match="was measured at layer 3"):
        against_published(found, path, layer=3, multiplier=2)
    path.write_text("[{}]")
    with pytest.raises(DataError, match="no result file"):
        against_published(found, path, layer=1, multiplier=2)


def test_it_resumes_and_is_reported(experiment, found, tmp_path):
    measured = experiment._session.cells.measured
    again = caa(experiment, {"runs": ITEMS}, layers=[1, 2], multipliers=[-1, 0, 2], held_out=0.25)
    assert again.table.equals(found.table)
    assert experiment._session.cells.measured == measured
    assert "Protocol: caa" in experiment.report(tmp_path / "report.md").read_text()
    assert experiment.verify(n=100).ok


def test_bad_arguments_are_refused(experiment):
    third = ChoiceItems.from_records(
        [{**row, "question": f"{row['question']}\n (C) Both", "answer_matching_behavior": " (C)"} for row in records()]
    )
    with pytest.raises(DataError, match="other than A and B"):
        caa(experiment, {"x": third}, layers=1)
    with pytest.raises(InputError, match="distinct"):
        caa(experiment, {"x": ITEMS}, layers=1, multipliers=[1, 1])
