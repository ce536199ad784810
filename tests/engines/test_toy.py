"""The toy engine does what every engine does, and what an engine is used for."""

import pytest

import steerlab as sl
from steerlab.engines.toy import ToyEngine
from tests.engines.contract import EngineContract


@pytest.fixture(scope="module")
def engine():
    return ToyEngine()


class TestToyEngine(EngineContract):
    pass


def test_a_closed_engine_says_so():
    engine = ToyEngine()
    engine.close()
    with pytest.raises(sl.InputError, match="closed"):
        engine.score("a", ["b"])


def test_other_sites_are_refused(engine):
    with pytest.raises(sl.InputError, match="resid_pre and resid_post"):
        engine.capture("abc", layers=1, site="mlp_out")


def test_an_experiment_runs_on_it(engine, tmp_path):
    pairs = sl.ContrastPairs.from_lists(["yes yes", "oh yes", "ya"], ["no no", "oh no", "na"])
    targets = sl.Targets.from_records(
        [
            {"prompt": p, "target": t, "label": label}
            for p in ("a:", "b:", "c:")
            for t, label in ((" yes", 1), (" no", -1))
        ]
    )
    with sl.Experiment("toy", engine, root=tmp_path, seed=1) as exp:
        vectors = exp.extract(pairs, layers=[1])
        found = exp.effect(
            sl.Plan(sl.add(vectors[1], dose=1.0)), targets, [-0.5, 0.0, 0.5], controls=sl.Controls(random=19)
        )
        assert exp.selfcheck(tolerance=1e-4).passed
        report = exp.report()
    assert len(found.rows)
    assert "toy" in report.read_text()
    again = sl.Experiment("toy", engine, root=tmp_path, seed=1)
    assert again.effects[0].summary()["slope"] == found.summary()["slope"]
