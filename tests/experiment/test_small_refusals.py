"""What is refused or told of before anything runs, and what a run that goes on does not repeat."""

from pathlib import Path
from typing import Any

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError, PlanError, RunError
from steerlab.experiment._report.document import document
from steerlab.experiment._report.write import material_of
from steerlab.experiment.scaling._folder import SweepFolder
from steerlab.models._resolver import layer_count
from tests.experiment.data import DEV, PAIRS, TARGETS

V = sl.SteeringVector.from_tensor(torch.randn(64, generator=torch.Generator().manual_seed(0)), layer=1)
FEW = {"controls": sl.Controls(random=0), "neutral": ["the cat ran home"], "max_ppl_ratio": 99.0}


@pytest.mark.parametrize("name", ["all", "prompt", "last_prompt", "generated", "default"])
def test_simple_positions_may_be_named(tiny_llama_engine: sl.LensEngine, name: str) -> None:
    meant = sl.where.last_prompt() | sl.where.generated() if name == "default" else getattr(sl.where, name)()
    assert sl.add(V, coef=1.0, where=name) == sl.add(V, coef=1.0, where=meant)
    assert sl.Plan(sl.ablate(V, where=name)).hash == sl.Plan(sl.ablate(V, where=meant)).hash
    assert sl.when(V, above=0.0, read=name) == sl.when(V, above=0.0, read=meant)
    if name in ("generated", "default"):
        return
    found, wanted = (tiny_llama_engine.capture(["the cat ran"], layers=[1], where=w) for w in (name, meant))
    assert found.positions == wanted.positions
    exp = sl.Experiment("x", tiny_llama_engine, root=None)
    assert exp.extract(PAIRS, layers=[1], read=name) is exp.extract(PAIRS, layers=[1], read=meant)
    made = sl.extract(tiny_llama_engine, PAIRS, layers=[1], read=name)
    assert made == sl.extract(tiny_llama_engine, PAIRS, layers=[1], read=meant)


def test_other_names_are_refused_with_those_that_are_known(tiny_llama_engine: sl.LensEngine) -> None:
    for call in (
        lambda: sl.add(V, coef=1.0, where="everywhere"),
        lambda: sl.when(V, above=0.0, read="everywhere"),
        lambda: tiny_llama_engine.capture(["the cat"], layers=[1], where="everywhere"),
        lambda: sl.extract(tiny_llama_engine, PAIRS, layers=[1], read="everywhere"),
    ):
        with pytest.raises(PlanError, match="'all', 'prompt', 'last_prompt', 'generated', 'default'; got 'everywhere'"):
            call()


def test_overwriting_a_folder_of_other_files_is_refused(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    (tmp_path / "run" / "cells").mkdir(parents=True)
    mine = tmp_path / "run" / "cells" / "notes.txt"
    mine.write_text("mine")
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path, overwrite=True)
    with pytest.raises(RunError, match=r"other files \(cells\)"):
        exp.score(None, TARGETS)
    with pytest.raises(RunError, match="holds no run"):
        SweepFolder(tmp_path / "run", overwrite=True)
    assert mine.read_text() == "mine"


def test_a_cleared_run_may_be_overwritten(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    for _ in range(2):
        with sl.Experiment("run", tiny_llama_engine, root=tmp_path, overwrite=True) as exp:
            exp.score(None, TARGETS)
        (tmp_path / "run" / "run.json").unlink()


def test_doses_without_0_are_told_of_before_the_run(
    tiny_llama_engine: sl.LensEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exp, plan = sl.Experiment("run", tiny_llama_engine, root=None), sl.Plan(sl.add(V, dose=1.0))
    exp.effect(plan, DEV, [0, 0.1, 0.2], **FEW)
    assert "dose 0" not in capsys.readouterr().err
    monkeypatch.setattr("steerlab.experiment.measurements.effect._measure.perplexities", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        exp.effect(plan, DEV, [0.1, 0.2, 0.3], **FEW)
    assert "info: effect: dose 0 is not among the doses" in capsys.readouterr().err


def test_two_lambdas_are_two_metrics(tiny_llama_engine: sl.LensEngine) -> None:
    exp, plan = sl.Experiment("run", tiny_llama_engine, root=None), sl.Plan(sl.add(V, dose=1.0))
    first, last = (lambda good, bad: float(good[0])), (lambda good, bad: float(bad[0]))
    exp.effect(plan, TARGETS, [0, 0.1, 0.2], metric=first, **FEW)
    exp.transfer(plan, DEV, [0, 0.2], metric=last)
    assert "of its effect above" not in str(document(material_of(exp._run)))
    exp.transfer(plan, DEV, [0, 0.2], metric=first)
    assert "of its effect above" in str(document(material_of(exp._run)))
    chosen = [exp.select(V, [0.1, 0.2], DEV, metric=metric) for metric in (first, last)]
    assert chosen[0].metric_identity != chosen[1].metric_identity
    assert len(exp.results.selections) == 2


def test_a_selfcheck_that_passed_is_not_repeated_when_a_run_goes_on(tiny_llama_path: Path, tmp_path: Path) -> None:
    for expected in (True, False):
        with sl.Experiment("run", tiny_llama_path, root=tmp_path) as exp:
            assert exp.selfcheck(layers=[1]).passed
            assert exp._session.loaded == expected
            assert len(exp.results.selfchecks) == 1
    with sl.Experiment("run", tiny_llama_path, root=tmp_path) as exp:
        exp.selfcheck(layers=[2])
        assert exp._session.loaded, "another check"


def test_a_selfcheck_asked_for_again_runs(tiny_llama_engine: sl.LensEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = sl.Experiment("run", tiny_llama_engine, root=None)
    exp.selfcheck(layers=[1])
    monkeypatch.setattr("steerlab.experiment.measurements.selfcheck.selfcheck", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        exp.selfcheck(layers=[1])


def test_lists_of_other_lengths_are_named_as_given() -> None:
    with pytest.raises(DataError, match="got 2 positives and 1 negatives"):
        sl.ContrastPairs.from_lists(["a", "b"], ["c"])
    with pytest.raises(DataError, match="got 1 groups for 2 pairs"):
        sl.ContrastPairs.from_lists(["a", "b"], ["c", "d"], ["x"])


def test_layers_are_counted_from_the_configuration(tiny_llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama_path / "config.json").read_text())
    assert layer_count(tmp_path) == 4
    assert layer_count(tmp_path / "nowhere") is None


@pytest.mark.parametrize("name", [5, None, Path("runs/first")])
def test_a_name_that_is_no_string_is_refused(name: Any, tiny_llama_engine: sl.LensEngine) -> None:
    with pytest.raises(InputError, match="name is a string"):
        sl.Experiment(name, tiny_llama_engine, root=None)


def test_a_schedule_of_zero_is_told_of_as_such(tiny_llama_engine: sl.LensEngine) -> None:
    plan = sl.Plan(sl.add(V, coef=1.0, schedule=sl.schedule.constant(0)))
    with pytest.warns(UserWarning, match="check its positions and its schedule"):
        tiny_llama_engine.generate(["the cat"], plan=plan, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "bfloat16", "device": "cpu"}, "dtype=, device= would be for a model .* runs already, in float32"),
        ({"overwite": True}, "overwite="),
        ({"backend": "vllm"}, "backend='vllm', but the engine given is one of 'lens'"),
    ],
    ids=["of loading", "misspelt", "backend"],
)
def test_options_of_loading_beside_an_engine(tiny_llama_engine: sl.LensEngine, options: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        sl.Experiment("x", tiny_llama_engine, root=None, **options)


def test_a_backend_may_be_named_beside_its_engine(tiny_llama_engine: sl.LensEngine) -> None:
    assert sl.Experiment("x", tiny_llama_engine, backend="lens", root=None).backend == "lens"


NO_PLAN: Any = V
NO_TARGETS: Any = ["the cat"]
POLICY: Any = {"temperature": 0.7}
PLAN = sl.Plan(sl.add(V, coef=1.0))


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (lambda x: x.effect(NO_PLAN, TARGETS, [0, 1]), PlanError, r"takes a Plan, got SteeringVector; wrap edits"),
        (lambda x: x.transfer(NO_PLAN, TARGETS, [0, 1]), PlanError, r"takes a Plan, got SteeringVector; wrap edits"),
        (lambda x: x.transfer(PLAN, TARGETS, [0, 1], engine="gpt2"), InputError, "engine is an engine, .* got 'gpt2'"),
        (lambda x: x.score(None, NO_TARGETS), InputError, "targets is a Targets"),
        (lambda x: x.select([V], [0.1], on=NO_TARGETS), InputError, "targets is a Targets"),
        (lambda x: x.interaction(PLAN, PLAN, NO_TARGETS, doses_a=[0], doses_b=[0]), InputError, "targets is a Targets"),
        (lambda x: x.entropy(PLAN, policy=POLICY), sl.PolicyError, "takes a SamplingPolicy"),
        (lambda x: x.select([V], [0.1], on=DEV, policy=POLICY), sl.PolicyError, "takes a SamplingPolicy"),
        (lambda x: x.generate(PLAN, ["the"], doses=[0], policy=POLICY), sl.PolicyError, "takes a SamplingPolicy"),
        (lambda x: x.extract([("a", "b")], layers=[1]), DataError, "takes ContrastPairs or Targets, got list"),
    ],
)
def test_arguments_of_another_kind(tiny_llama_engine: sl.LensEngine, call: Any, kind: type, told: str) -> None:
    with pytest.raises(kind, match=told):
        call(sl.Experiment("x", tiny_llama_engine, root=None))


def test_a_run_is_opened_by_its_path() -> None:
    number: Any = 5
    with pytest.raises(RunError, match="takes the path of a run directory, got 5"):
        sl.Experiment.load(number)
