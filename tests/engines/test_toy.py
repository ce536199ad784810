"""The toy engine does what every engine does, and what an engine is used for."""

import pandas as pd
import pytest
import torch

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


def test_a_run_on_it_is_read_without_it(engine, tmp_path):
    targets = sl.Targets.from_records(
        [{"prompt": "a:", "target": " yes", "label": 1}, {"prompt": "a:", "target": " no", "label": -1}]
    )
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor([1.0] * 32, layer=1), coef=1.0))
    with sl.Experiment("read", engine, root=tmp_path) as exp:
        found = exp.effect(plan, targets, [0.0, 1.0], controls=sl.Controls(random=0))
    loaded = sl.Experiment.load(tmp_path / "read")
    assert loaded.effects[0].rows.equals(found.rows)
    with pytest.raises(sl.InputError, match="pass that engine"):
        loaded.engine.score("a", ["b"])
    with pytest.raises(sl.InputError, match="Unknown backend 'toy'"):
        sl.Experiment("other", "smollm2-135m", backend="toy", root=None)


def test_a_plan_without_edits_has_no_effect_to_measure(engine):
    targets = sl.Targets.from_records(
        [{"prompt": "a:", "target": " yes", "label": 1}, {"prompt": "a:", "target": " no", "label": -1}]
    )
    with pytest.raises(sl.PlanError, match="no edits"):
        sl.Experiment("e", engine, root=None).effect(sl.Plan(), targets, [0.0, 1.0])
    with pytest.raises(sl.InputError, match="what select found"):
        sl.Experiment("e", engine, root=None).confirm(None, on=targets)


def test_what_is_no_prompt_or_number_is_named(engine):
    with pytest.raises(sl.PromptError, match="DataFrame, whose elements are names"):
        engine.generate(pd.DataFrame({"prompt": ["a"]}))
    with pytest.raises(sl.PromptError, match="neither a token id nor a chat message"):
        engine.generate([[]])
    with pytest.raises(sl.InputError, match="complex"):
        engine.measure("a", ["b"], {"m": lambda logits, tokens: logits[:, 0].to(torch.complex64)})
    with pytest.raises(sl.VectorShapeError, match="holds real numbers"):
        sl.SteeringVector.from_tensor(torch.ones(4, dtype=torch.complex64), layer=1)
