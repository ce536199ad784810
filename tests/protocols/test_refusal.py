"""The refusal direction on a tiny model: every figure again from the engine's own logits."""

import numpy as np
import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.protocols import ablation_everywhere, refusal
from steerlab.protocols.refusal import _split
from tests.protocols.data import THINGS

HARMFUL = [f"Hurt the {thing} now" for thing in THINGS[:8]]
HARMLESS = [f"Feed the {thing} today" for thing in THINGS[:8]]
OPTIONS = {"refusal_tokens": ["I", "As"], "positions": 2, "max_kl": 50.0, "least_induced": -50.0, "late": 0.0}


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine, tmp_path_factory):
    return sl.Experiment("run", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=1)


@pytest.fixture(scope="module")
def found(experiment):
    return refusal(experiment, HARMFUL, HARMLESS, **OPTIONS)


def next_probs(engine, text, plan=None):
    """The distribution after a chat's user turn, from the engine's measure of raw logits."""

    def softmax(logits, tokens):
        return torch.softmax(logits.double(), dim=-1)

    return engine.measure([text], [["x"]], {"p": softmax}, plan=plan, chat=True)[0]["p"][0]


def log_odds(engine, texts, plan=None):
    found = []
    for text in texts:
        p = sum(np.exp(engine.score([text], [[word]], plan=plan, chat=True)[0].log_prob) for word in ("I", "As"))
        found.append(np.log(p + 1e-8) - np.log(1 - p + 1e-8))
    return np.array(found)


def test_one_plan_takes_the_direction_out_everywhere(tiny_llama_engine):
    engine = tiny_llama_engine
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    plan = ablation_everywhere(sl.SteeringVector.from_tensor(values, layer=1), range(4))
    assert len(plan) == 8
    for site in ("resid_mid", "resid_post"):
        streams = engine.capture(["the cat ran home"], layers="all", site=site, plan=plan)
        for layer in range(4):
            along = streams[layer] @ (values / values.norm())
            assert along.abs().max() < 1e-4, (site, layer)


def test_the_grid_by_hand(found, experiment, tiny_llama_engine):
    engine = tiny_llama_engine
    assert len(found.rows) == 2 * 3  # positions × layers before the last
    (train_bad, val_bad, _), (train_good, val_good, _) = _split(HARMFUL, HARMLESS, 1)
    for position, layer in ((-1, 1), (-2, 2)):
        row = found.rows[(found.rows.position == position) & (found.rows.layer == layer)].iloc[0]
        means = []
        for texts in (train_bad, train_good):
            read = engine.capture(texts, layers=[layer], where=sl.where.index(position), pool="last", chat=True)
            means.append(read[layer].mean(dim=0))
        vector = sl.SteeringVector.from_tensor(means[0] - means[1], layer=layer)
        everywhere = ablation_everywhere(vector, range(4))
        assert row.bypass == pytest.approx(log_odds(engine, val_bad, everywhere).mean(), abs=1e-3)
        added = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.all()))
        assert row.induce == pytest.approx(log_odds(engine, val_good, added).mean(), abs=1e-3)
        kls = []
        for text in val_good:
            p, q = next_probs(engine, text), next_probs(engine, text, everywhere)
            kls.append(float((p * (np.log(p) - np.log(q))).sum()))
        assert row.kl == pytest.approx(np.mean(kls), abs=1e-4)


def test_the_choice_is_the_least_refusal_of_those_that_stay(found, experiment):
    best = found.rows.loc[found.rows.bypass.idxmin()]
    row = found.table.iloc[0]
    assert (row.position, row.layer, row.of_layers) == (best.position, best.layer, 4)
    assert row.bypass == best.bypass
    bound = float(np.sort(found.rows.kl)[2])
    stricter = refusal(experiment, HARMFUL, HARMLESS, **{**OPTIONS, "max_kl": bound})
    stay = found.rows[found.rows.kl <= bound]
    assert (stricter.rows.left_out == "").sum() == len(stay) == 3
    assert stricter.table.bypass[0] == stay.bypass.min()
    none = refusal(experiment, HARMFUL, HARMLESS, **{**OPTIONS, "least_induced": 90.0})
    assert none.table.layer.isna().all()
    assert "All 6 candidates are left out" in none.sentences[0]


def test_held_out_figures_by_hand(found, tiny_llama_engine):
    (_, _, bad), (_, _, good) = _split(HARMFUL, HARMLESS, 1)
    row = found.table.iloc[0]
    assert row.harmful == pytest.approx(log_odds(tiny_llama_engine, bad).mean(), abs=1e-3)
    assert row.harmless == pytest.approx(log_odds(tiny_llama_engine, good).mean(), abs=1e-3)
    assert np.isfinite([row.harmful_ablated, row.harmless_added]).all()


def test_it_resumes_and_is_reported(experiment, found, tiny_llama_engine, tmp_path):
    measured = experiment._session.cells.measured
    assert refusal(experiment, HARMFUL, HARMLESS, **OPTIONS).table.equals(found.table)
    assert experiment._session.cells.measured == measured
    report = experiment.report(tmp_path / "report.md").read_text()
    assert "Protocol: refusal" in report
    assert experiment.verify(n=0).ok


def test_the_late_layers_are_not_tried(experiment):
    found = refusal(experiment, HARMFUL, HARMLESS, **{**OPTIONS, "late": 0.5, "positions": 1})
    assert found.rows.layer.tolist() == [0]  # inputs of layers 1 and on; from 2 on they are late


def test_bad_arguments_are_refused(experiment):
    with pytest.raises(DataError, match="8 harmful and 7 harmless"):
        refusal(experiment, HARMFUL, HARMLESS[1:])
    with pytest.raises(DataError, match="stands twice"):
        refusal(experiment, HARMFUL, HARMFUL)
    with pytest.raises(DataError, match="too few"):
        refusal(experiment, HARMFUL[:1], HARMLESS[:1])
    with pytest.raises(InputError, match="refusal_tokens is a list"):
        refusal(experiment, HARMFUL, HARMLESS, refusal_tokens="I")
    with pytest.raises(InputError, match="No layer is left"):
        refusal(experiment, HARMFUL, HARMLESS, layers=[3])
    with pytest.raises(InputError, match="must differ"):
        refusal(experiment, HARMFUL, HARMLESS, **{**OPTIONS, "refusal_tokens": ["I", "I"]})
