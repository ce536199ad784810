"""A plan of analysis is written before the data, kept as it was, and every departure from it is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import DataError, InputError
from steerlab.experiment.measurements.preregistration import Preregistration
from tests.experiment.data import DEV, HELD_OUT, PAIRS, TARGETS, TEXTS

DOSES = [-0.2, 0.0, 0.2]
few_draws = pytest.mark.filterwarnings("ignore:. random draws cannot rank below")


@pytest.fixture(scope="module")
def vector(tiny_llama_engine: sl.LensEngine) -> sl.SteeringVector:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.SteeringVector.from_tensor(values, layer=1, model=tiny_llama_engine.info)


@few_draws
def test_it_is_written_before_the_data_and_shown_beside_them(
    tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector, tmp_path: Path
) -> None:
    plan, two = sl.Plan(sl.add(vector, dose=1.0)), sl.Controls(random=2)
    exp = sl.Experiment("planned", tiny_llama_engine, root=tmp_path)
    planned = exp.preregister("Does it move?", plan, TARGETS, DOSES, smallest=3.0, controls=two, neutral=TEXTS)
    (written,) = (exp.path / "findings").glob("preregistration-*/finding.json")
    stated = json.loads(written.read_text(encoding="utf-8"))
    assert (stated["hash"], stated["time"]) == (planned.hash, planned.time)
    assert planned.earlier_looks == 0
    assert not exp.looks, "nothing was measured"
    again = exp.preregister("Does it move?", plan, TARGETS, DOSES, smallest=3.0, controls=two, neutral=TEXTS)
    assert again is planned, "what is written keeps its time"

    as_planned = exp.effect(plan, TARGETS, DOSES, smallest=3.0, controls=two, neutral=TEXTS)
    assert planned.departures(as_planned) == []
    report = exp.report(tmp_path / "report.md").read_text(encoding="utf-8")
    assert report.index("Plan of analysis, written before the data") < report.index("Verdict:")
    assert planned.hash in report
    assert "Effect 1 was measured as planned." in report

    other = exp.effect(plan, TARGETS, [-0.1, 0.0, 0.1], metric="choice_prob", controls=sl.Controls(random=1))
    told = planned.departures(other)
    names = ["doses", "metric", "smallest slope that matters", "control draws", "neutral texts"]
    assert [line.split(":")[0].removeprefix("Not as planned, ") for line in told] == names
    assert "planned 2 random; done 1 random" in told[3]
    assert planned.departures(replace(as_planned, settings=replace(as_planned.settings, level=0.9)))
    late = exp.preregister("And now?", plan, TARGETS, DOSES)
    assert late.earlier_looks == 2
    assert "no plan before the data" in str(late)

    exp.close()
    loaded = sl.Experiment.load(tmp_path / "planned")
    assert [one.hash for one in loaded.results.preregistrations] == [planned.hash, late.hash]
    assert loaded.verify(n=0).ok
    stated["doses"] = {"$tuple": [-0.1, 0.0, 0.1]}
    written.write_text(json.dumps(stated), encoding="utf-8")
    assert not sl.Experiment.load(tmp_path / "planned").verify(n=0).ok, "it was changed afterwards"


def test_a_confirmation_runs_what_was_planned_and_says_what_departs(
    tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector
) -> None:
    exp = sl.Experiment("confirmed", tiny_llama_engine, root=None)
    best = exp.select(vector, [-0.3, 0.3], DEV)
    planned = exp.preregister("Does it hold?", None, HELD_OUT, [0.0, 0.3], controls=sl.Controls(random=19))
    found = exp.confirm(best, HELD_OUT)
    assert found.preregistration == planned.hash
    assert list(found.null_ranks) == ["random"], "the planned controls ran"
    assert found.departures == ()
    other = exp.confirm(best, HELD_OUT, metric="choice_prob")
    assert any("Not as preregistered" in note and "metric" in note for note in other.notes)
    assert exp.confirm(best, TARGETS).preregistration is None, "of other items"


def test_the_hash_is_of_everything_that_is_written(tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector) -> None:
    exp = sl.Experiment("hashed", tiny_llama_engine, root=None)
    one = exp.preregister("Does it?", sl.Plan(sl.add(vector, dose=1.0)), TARGETS, DOSES)
    changes = {"question": "Is it?", "doses": (0.0, 0.1), "smallest": 1.0, "controls": {"random": 3}, "time": "now"}
    changes |= {"plan": None, "level": 0.9, "max_ppl_ratio": 9.0, "adjustment": "fdr", "earlier_looks": 5}
    found = {replace(one, **{name: value}, hash="").hash for name, value in changes.items()}
    assert len(found | {one.hash}) == len(changes) + 1
    assert isinstance(one, Preregistration)
    assert replace(one, hash="").hash == one.hash


def test_what_cannot_be_planned_is_refused(tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector) -> None:
    exp, plan = sl.Experiment("refused", tiny_llama_engine, root=None), sl.Plan(sl.add(vector, dose=1.0))
    with pytest.raises(InputError, match="in words what is asked"):
        exp.preregister(" ", plan, TARGETS, DOSES)
    with pytest.raises(InputError, match="smallest"):
        exp.preregister("Does it?", plan, TARGETS, DOSES, smallest=0)
    with pytest.raises(InputError, match="adjust is one of 'holm', 'fdr'"):
        exp.preregister("Does it?", plan, TARGETS, DOSES, adjust="bonferroni")
    with pytest.raises(DataError, match="pass pairs="):
        exp.preregister("Does it?", plan, TARGETS, DOSES, controls=sl.Controls(shuffled=20))
    assert exp.preregister("?", plan, TARGETS, DOSES, controls=sl.Controls(shuffled=20), pairs=PAIRS).pairs_hash


@few_draws
def test_departures_are_told_however_small_and_only_where_there_are_some(
    tiny_llama_engine: sl.LensEngine, vector: sl.SteeringVector, tmp_path: Path
) -> None:
    plan, two = sl.Plan(sl.add(vector, dose=1.0)), sl.Controls(random=2)
    exp = sl.Experiment("close", tiny_llama_engine, root=tmp_path)
    options = {"controls": two, "neutral": TEXTS}
    planned = exp.preregister("Does it move?", plan, TARGETS, [-0.2, 0.0, 0.2000001], smallest=3.0000001, **options)
    done = exp.effect(plan, TARGETS, DOSES, smallest=3.0, **options)
    told = planned.departures(done)
    assert [line.split(":")[0] for line in told] == [
        "Not as planned, doses",
        "Not as planned, smallest slope that matters",
    ]
    assert "0.2000001; done -0.2, 0, 0.2" in told[0]

    huge = [0.0, 5e4, 1e5]  # none within the cost, so that no control ran
    planned = exp.preregister("Does it break?", plan, TARGETS, huge, max_ppl_ratio=1.0, **options)
    broken = exp.effect(plan, TARGETS, huge, max_ppl_ratio=1.0, **options)
    assert broken.verdict == "collapsed"
    assert planned.departures(broken) == []
