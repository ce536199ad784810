"""The same effect on vLLM: few calls, the same rows as on TransformerLens, and a clear word about layers."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import steerlab as sl
from steerlab.core.errors import PlanError
from tests.experiment.data import PAIRS, PROMPTS, TARGETS, TEXTS
from tests.tiny_models import build_tiny_llama
from tests.vllm.conftest import OPTIONS as OF_A_SMALL_ENGINE
from tests.vllm.conftest import set_up_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

DOSES = [-0.2, 0.0, 0.2]
OPTIONS = {"controls": sl.Controls(random=19), "neutral": TEXTS, "max_ppl_ratio": 50.0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vllm") / "llama"
    return build_tiny_llama(directory, context=512, hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="module")
def experiment(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sl.Experiment]:
    options = {"layers": [1], **OF_A_SMALL_ENGINE}
    with (
        set_up_vllm(in_process=True),
        sl.Experiment("run", path, backend="vllm", root=tmp_path_factory.mktemp("runs"), **options) as exp,
    ):
        yield exp


@pytest.fixture(scope="module")
def vector(path: Path) -> sl.SteeringVector:
    with sl.load(path, device="cpu") as engine:
        return sl.extract(engine, PAIRS, layers=[1, 2])[1]


def test_an_effect_takes_few_calls_and_gives_the_rows_of_the_lens_engine(
    experiment: sl.Experiment, vector: sl.SteeringVector, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = experiment.engine
    calls, score = [], engine.score
    monkeypatch.setattr(engine, "score", lambda *args, **options: calls.append(options) or score(*args, **options))
    plan = sl.Plan(sl.add(vector, dose=1.0))
    on_vllm = experiment.effect(plan, TARGETS, DOSES, **OPTIONS)
    assert len(calls) == 1 + 2 + 2, "texts: once unsteered and at two doses; items: the vector's arm, all controls"
    on_lens = sl.Experiment("lens", path, root=None).effect(plan, TARGETS, DOSES, **OPTIONS)
    same = ["family", "draw", "dose", "item", "group", "plan_hash", "vector_hash", "data_hash", "model_hash"]
    pd.testing.assert_frame_equal(on_vllm.rows[same], on_lens.rows[same])
    np.testing.assert_allclose(on_vllm.rows.value, on_lens.rows.value, atol=2e-3)
    assert set(on_vllm.rows.engine_hash).isdisjoint(on_lens.rows.engine_hash), "cells of two engines never mix"
    again = experiment.effect(plan, TARGETS, DOSES, **OPTIONS)
    assert len(calls) == 5
    pd.testing.assert_frame_equal(again.rows, on_vllm.rows)
    assert experiment.verify(n=3).ok
    assert (path, experiment.backend) == (Path(experiment.configuration()["model"]), "vllm")


def test_layers_that_are_not_wired_are_named(experiment: sl.Experiment, vector: sl.SteeringVector) -> None:
    plan = sl.Plan(sl.add(vector.at(2), coef=1.0))
    assert experiment.engine.info.n_layers == 4
    with pytest.raises(PlanError, match=r"layers=\[1, 2\]"):
        experiment.effect(plan, TARGETS, DOSES, **OPTIONS)
    wrong_layer = {**OPTIONS, "controls": sl.Controls(random=0, wrong_layer=True)}
    with pytest.raises(PlanError, match=r"layers=\["):
        experiment.effect(sl.Plan(sl.add(vector, dose=1.0)), TARGETS, DOSES, **wrong_layer)


def test_parity_starts_the_other_engine_itself(experiment: sl.Experiment, vector: sl.SteeringVector) -> None:
    plan = sl.Plan(sl.add(vector, dose=1.0))
    found = experiment.parity(plan, PROMPTS, against="lens", max_new_tokens=4)
    assert found.passed, found.reasons
    assert experiment.parity(plan, PROMPTS, against="lens", max_new_tokens=4) is found
