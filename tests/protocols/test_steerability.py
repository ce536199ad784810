"""Steerability by hand: slopes from scores of the engine itself, variance over items and prompts."""

import numpy as np
import pytest
from scipy import stats

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.protocols import ChoiceItems, ProtocolResult, steerability
from steerlab.protocols.steerability import SHARES, explained_share
from tests.protocols.data import ITEMS, records

MULTIPLIERS = [-1.0, 0.0, 1.0, 2.0]
PROMPTS = {"polite": "Please answer. ", "system": {"system": "the bird came back"}}


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine, tmp_path_factory):
    return sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=2)


@pytest.fixture(scope="module")
def found(experiment):
    return steerability(experiment, {"runs": ITEMS}, layers=1, multipliers=MULTIPLIERS, prompts=PROMPTS)


def test_slopes_by_hand(found, tiny_llama_engine):
    engine = tiny_llama_engine
    train, _, test = ITEMS.split(SHARES, seed=2)
    vector = sl.extract(engine, train.pairs(chat=False), layers=[1])[1]
    for prompt, before in (("plain", ""), ("polite", "Please answer. "), ("system", "the bird came back\n\n")):
        rows = found.rows[found.rows.prompt == prompt]
        for item, row in zip(test, rows.itertuples(), strict=True):
            values = []
            for factor in MULTIPLIERS:
                plan = None if factor == 0 else sl.Plan(sl.add(vector, coef=factor))
                text = f"{before}{item.question}\n\nAnswer: ("
                log_p = engine.score([text], [[item.matching, item.other]], plan=plan).log_prob
                values.append(log_p[0] - log_p[1])
            assert row.slope == pytest.approx(stats.linregress(MULTIPLIERS, values).slope, abs=1e-4)
            assert row.propensity == pytest.approx(values[1], abs=1e-4)


def test_the_table_says_what_the_rows_do(found):
    assert isinstance(found, ProtocolResult)
    assert found.table.prompt.tolist() == ["plain", "polite", "system"]
    wide = found.rows.pivot(index="item", columns="prompt", values="slope")
    for row in found.table.itertuples():
        slopes = wide[row.prompt]
        assert (row.layer, row.items) == (1, 6)
        assert row.steerability == pytest.approx(slopes.mean())
        assert row.sd_items == pytest.approx(slopes.std())
        assert row.anti_steerable == pytest.approx((slopes < 0).mean())
        assert row.steerability_low <= row.steerability <= row.steerability_high
        assert row.sd_prompts == pytest.approx(wide.mean().std())
        assert row.correlation == pytest.approx(stats.spearmanr(wide["plain"], slopes).statistic)
        part = found.rows[found.rows.prompt == row.prompt]
        letters = [part.slope[part.matching == letter] for letter in "AB"]
        f = stats.f_oneway(*letters)  # η² = F·df₁ / (F·df₁ + df₂)
        assert row.letter_share == pytest.approx(f.statistic / (f.statistic + len(part) - 2))


def test_the_layer_is_the_best_on_validation_questions(experiment, tiny_llama_engine):
    several = steerability(experiment, {"runs": ITEMS}, layers=[1, 2], multipliers=MULTIPLIERS)
    train, validation, _ = ITEMS.split(SHARES, seed=2)
    vectors = sl.extract(tiny_llama_engine, train.pairs(chat=False), layers=[1, 2])
    means = {}
    for layer in (1, 2):
        targets = validation.targets(chat=False)
        effect = [
            tiny_llama_engine.score(
                targets.prompts,
                [item.targets for item in targets],
                plan=sl.Plan(sl.add(vectors[layer], coef=factor)) if factor else None,
            ).log_prob
            for factor in MULTIPLIERS
        ]
        margin = np.array(effect)[:, 0::2] - np.array(effect)[:, 1::2]
        means[layer] = stats.linregress(MULTIPLIERS, margin.mean(axis=1)).slope
    assert several.table.layer.tolist() == [max(means, key=means.get)]


def test_it_is_kept_reported_and_resumed(experiment, found, tiny_llama_engine, tmp_path):
    experiment.close()
    again = sl.Experiment("run", tiny_llama_engine, root=experiment.path.parent, seed=2)
    repeated = steerability(again, {"runs": ITEMS}, layers=1, multipliers=MULTIPLIERS, prompts=PROMPTS)
    assert again._session.cells.measured == 0
    assert repeated.table.equals(found.table)
    loaded = sl.Experiment.load(experiment.path).results.protocols[0]
    assert loaded.table.equals(found.table)
    assert loaded.same == found.same
    report = again.report(tmp_path / "report.md").read_text()
    for words in ("Protocol: steerability", "Tan et al. 2024", "Different from what was published"):
        assert words in report
    assert again.verify(n=100).ok
    assert [look.kind for look in again.looks].count("steerability") == 2
    again.close()


def test_share_between_groups_by_hand():
    assert explained_share(np.array([0.0, 2.0, 1.0, 3.0]), ["A", "A", "B", "B"]) == pytest.approx(1 / 5)
    assert np.isnan(explained_share(np.array([1.0, 2.0]), ["A", "A"]))
    assert np.isnan(explained_share(np.array([1.0, 1.0]), ["A", "B"]))


def test_bad_arguments_are_refused(experiment, tiny_llama_engine):
    with pytest.raises(InputError, match="runs in an experiment"):
        steerability(tiny_llama_engine, {"runs": ITEMS}, layers=1)
    with pytest.raises(InputError, match="questions by name"):
        steerability(experiment, ITEMS, layers=1)
    with pytest.raises(InputError, match="two or more distinct"):
        steerability(experiment, {"runs": ITEMS}, layers=1, multipliers=[1.0])
    with pytest.raises(InputError, match="other than 'plain'"):
        steerability(experiment, {"runs": ITEMS}, layers=1, prompts={"plain": "x"})
    with pytest.raises(DataError, match="too few"):
        steerability(experiment, {"runs": ChoiceItems.from_records(records(2))}, layers=1)
    with pytest.raises(sl.HookPointError):
        steerability(experiment, {"runs": ITEMS}, layers=99)
