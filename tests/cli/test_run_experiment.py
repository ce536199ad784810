"""What an experiment file may ask for beyond one effect; `test_yaml_file` has the keys, `test_commands` a basic run."""

import inspect
import json
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import steerlab as sl
from steerlab._cli.inputs import LENS_OPTIONS, Blame, load_options, read_inputs
from steerlab._cli.yaml_file import read_spec
from steerlab.engines.lens import load as load_lens
from tests.cli.conftest import write_changed

SMALLEST = {
    "name": "trial",
    "pairs": {"path": "pairs.jsonl", "group": "group", "split": "train"},
    "vector": {"layer": 1},
    "targets": {"path": "targets.jsonl", "split": "test"},
    "doses": [-0.1, 0, 0.1],
    "controls": {"random": 0},
    "neutral": "neutral.txt",
    "max_ppl_ratio": 50,
    "selfcheck": False,
    "report": False,
}


@pytest.fixture
def write(own_data, tiny_llama_path):
    """Writes the smallest experiment with changes in a folder with the data."""
    dev = [
        {"prompt": f"The {thing} is", "target": word, "label": label, "group": thing}
        for thing in ("horse", "garden", "letter")
        for word, label in ((" happy", 1), (" sad", -1))
    ]
    (own_data / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dev))
    content = {**SMALLEST, "model": str(tiny_llama_path), "root": "out"}
    return lambda changes=None: write_changed(own_data / "trial.yaml", content, changes)


SELECT = {"vector": {"layers": [1, 2]}, "select": {"targets": {"path": "dev.jsonl"}, "doses": [0.1, 0.2]}}


# --- a plan before the data ---------------------------------------------------------------------------------------


def test_a_question_writes_the_plan_of_every_vector_before_it_is_measured(steerlab, write):
    path = write({"question": "Does it move the margin?", "vector": {"layers": [1, 2]}, "report": True})
    for _ in range(2):  # the second time nothing is measured, and the plans are those written before
        found = steerlab("run", path)
        assert found.code == 0, (found.err, found.exception)
    with sl.Experiment.load(path.parent / "out" / "trial") as run:
        plans = run.results.preregistrations
        assert [one.plan.hash for one in plans] == [effect.plan_hash for effect in run.effects]
        assert [one.departures(effect) for one, effect in zip(plans, run.effects, strict=True)] == [[], []]
        assert [one.earlier_looks for one in plans] == [0, 0]
    report = (path.parent / "out" / "trial" / "report.html").read_text()
    assert report.count("was measured as planned") == 2


def test_with_a_selection_the_plan_is_the_one_to_be_chosen(steerlab, write):
    found = steerlab("run", write({**SELECT, "question": "Does it move the margin?"}))
    assert found.code == 0, (found.err, found.exception)
    assert "Does it move the margin?" in found.out


# --- the file -----------------------------------------------------------------------------------------------------


def sections(kind: type[BaseModel]) -> set[type[BaseModel]]:
    """A section and all inside it."""
    found = {kind}
    for field in kind.model_fields.values():
        parts = [field.annotation]
        while parts:
            part = parts.pop()
            parts += get_args(part)
            if isinstance(part, type) and issubclass(part, BaseModel) and part not in found:
                found |= sections(part)
    return found


def test_every_key_is_described_where_it_is_declared():
    from steerlab._cli.spec import ExperimentSpec
    from steerlab._cli.sweep_spec import SweepSpec

    missing = [
        f"{kind.__name__}.{key}"
        for kind in sections(ExperimentSpec) | sections(SweepSpec)
        for key in kind.model_fields
        if f"\n    {key}: " not in (inspect.getdoc(kind) or "")
    ]
    assert missing == []


def test_the_documentation_names_every_key():
    from steerlab._cli.spec import ExperimentSpec
    from steerlab._cli.sweep_spec import SweepSpec

    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    keys = {key for kind in sections(ExperimentSpec) | sections(SweepSpec) for key in kind.model_fields}
    assert [key for key in sorted(keys) if f"{key}:" not in page] == []


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"vector": None}, "an experiment has 'vector', or 'vectors' by name; exactly one of them."),
        ({"vectors": {"a": {"layer": 1}}}, "exactly one of them."),
        ({"vector": None, "vectors": {}}, "'vectors' holds no vector."),
        ({"vector": {"layer": 1, "layers": [2]}}, "vector: takes 'layer' or 'layers', not both."),
        ({"vector": {"file": "v", "method": "lda"}}, "vector: a vector from a file takes no 'method'."),
        ({"pairs": None}, "the key 'pairs' is missing; vector is extracted from contrast pairs."),
        (
            {"vector": {"file": "v"}, "pairs": None, "controls": {"shuffled": 20}},
            "label flips (shuffled) extract",
        ),
        (
            {"vector": None, "vectors": {"joy": {"layr": 1}}},
            "unknown key 'vectors.joy.layr'; did you mean 'vectors.joy.l",
        ),
        ({"vector.pairs": {"pth": "a"}}, "unknown key 'vector.pairs.pth'; did you mean 'vector.pairs.path'? Its value"),
        ({"selfcheck": {"alow_failure": True}}, "did you mean 'selfcheck.allow_failure'? Its value is True."),
        ({"selfcheck": "no"}, "selfcheck: must hold keys (run, allow_failure, tolerance), got 'no'."),
        ({"baselines": {"ratios": [1.1]}}, "baselines: needs 'prompting' or 'few_shot'"),
        ({"baselines": {"few_shot": ["a"], "numbers": [2]}}, "baselines: numbers are from 1 to 1"),
        ({"generations": {"prompts": ["a"], "judge": {"rubric": "Rate it."}}}, "no place for what is judged"),
        ({"confirm": True}, "'confirm' measures what 'select' chose; there is no 'select'."),
        ({"select": {"doses": [1]}}, "the key 'select.targets' is missing."),
        ({"select": {**SELECT["select"], "subject_to": {"ppl": 1.1}}}, "select.subject_to: Unknown constraint 'ppl'"),
        (
            {"select": {**SELECT["select"], "subject_to": {"ppl_ratio": "x"}}},
            "select.subject_to.ppl_ratio: input should",
        ),
        ({"select.targets": {"path": "nothing.jsonl"}, "select.doses": [1]}, "select.targets: Cannot read"),
        ({"backend": "vlm"}, "backend: input should be 'lens' or 'vllm', got 'vlm'."),
        (
            {"engine": {"n_device": 2}},
            "engine: the lens engine has no option 'n_device' (its value is 2); did you mean",
        ),
        (
            {"engine": {"max_model_len": 2}},
            "has no option 'max_model_len' (its value is 2); there are device, n_devices",
        ),
        ({"vector": {"file": "nothing.safetensors"}}, "vector.file: "),
        ({"report": 3}, "report: "),
        ({"cost": "yes"}, "cost: input should be a valid boolean, got 'yes'."),
        ({"policy.repetition_penalty": 0}, "policy: repetition_penalty must be > 0"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, dict) else None,
)
def test_complaints_name_file_key_value_and_the_nearest_key(steerlab, write, changes, wanted):
    path = write(changes)
    said = steerlab("run", path).sentence
    assert said.startswith(f"{path}: ")
    assert wanted in said


def test_a_layer_that_the_model_lacks_is_refused_before_the_model_loads(steerlab, write):
    refused = steerlab("run", write({"vector.layer": 99, "selfcheck": {"run": True}}))
    assert refused.code == 2
    assert "vector: " in refused.err
    assert "99" in refused.err
    assert "Loading" not in refused.out
    negative = steerlab("run", write({"vector": {"layers": [0, -99]}}))
    assert "-99" in negative.err
    assert "Loading" not in negative.out


def test_a_report_of_another_kind_is_refused_before_anything_is_measured(steerlab, write):
    path = write({"report": "report.pdf"})
    assert "report: A report is written as .html or .md; 'report.pdf' is neither." in steerlab("run", path).sentence


def test_paths_of_all_sections_count_from_the_file(write, tmp_path):
    spec = read_spec(write({**SELECT, "vector.pairs": {"path": "own.jsonl"}, "report": "out/a.md"}))
    assert spec.select is not None
    assert spec.vector is not None
    assert spec.vector.pairs is not None
    assert spec.select.targets.path == tmp_path / "dev.jsonl"
    assert spec.vector.pairs.path == tmp_path / "own.jsonl"
    assert spec.report == tmp_path / "out" / "a.md"
    named = read_spec(write({"vector": None, "vectors": {"a": {"file": "a.safetensors"}}}))
    assert named.named_vectors()["vectors.a"].file == tmp_path / "a.safetensors"


def test_lens_options_are_those_of_load():
    named = set(inspect.signature(load_lens).parameters) - {"model", "dtype", "tokenizer"}
    assert set(LENS_OPTIONS) == named


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"vector": {"layer": 3}}, [3]),
        (SELECT, [1, 2]),
        ({"controls.wrong_layer": True}, "all"),
        ({"vector": {"layers": "all"}}, "all"),
        ({"engine": {"layers": [0, 1]}}, [0, 1]),
        ({**SELECT, "confirm": {"controls": {"random": 0, "wrong_layer": True}}}, "all"),
        ({"vector": None, "vectors": {"a": {"layer": 2}, "b": {"layer": 0}}}, [0, 2]),
    ],
    ids=str,
)
def test_vllm_is_started_with_the_layers_that_are_edited(write, changes, layers):
    spec = read_spec(write({**changes, "backend": "vllm"}))
    assert load_options(spec) == {"dtype": "float32", "layers": layers}


def test_an_engine_option_reaches_the_engine(write):
    spec = read_spec(write({"engine": {"batch_tokens": 64, "device": "cpu"}}))
    assert read_inputs(spec, Blame(None)).load_options == {"dtype": "float32", "batch_tokens": 64, "device": "cpu"}


# --- runs ---------------------------------------------------------------------------------------------------------


def loaded(tmp_path: Path) -> sl.Experiment:
    return sl.Experiment.load(tmp_path / "out" / "trial")


@pytest.mark.slow
def test_select_confirm_and_the_effect_of_the_winner(steerlab, write, tmp_path):
    changes = {**SELECT, "confirm": {"controls": {"random": 19}}, "selfcheck": True, "cost": True, "report": "page.md"}
    generations = {"prompts": ["The soup was"], "max_new_tokens": 3, "doses": [0, 0.1]}
    path = write({**changes, "generations": generations})
    first = steerlab("run", path)
    assert first.code == 0, (first.err, first.exception)
    assert "selfcheck passed: 7 checks" in first.out
    exp = loaded(tmp_path)
    (selection,), (confirmation,) = exp.results.selections, exp.results.confirmations
    assert len(selection.table) == 2 * 2
    assert confirmation.look == 1
    assert confirmation.num_items == 4
    assert set(confirmation.null_ranks) == {"random"}
    assert f"confirmed         {str(confirmation).splitlines()[0]}" in first.out
    (effect,) = exp.effects
    assert effect.provenance["targets_hash"] == confirmation.on_hash
    assert f"blocks.{selection.layer}.hook_resid_post" in effect.plan_text
    cost = exp.results.costs[0]
    assert cost.dose.tolist() == [0.0, 0.1]
    assert {"repetition", "distinct_1"} <= set(cost.columns)
    assert "cost at +0.1" in first.out
    page = (tmp_path / "page.md").read_text()
    assert "trial" in page
    cells = {place: place.stat().st_mtime_ns for place in (tmp_path / "out" / "trial" / "cells").rglob("*.parquet")}
    assert "there already" not in first.err, "what measurements share is no news"
    again = steerlab("run", path)
    assert again.code == 0
    assert again.err.count("there already") == 1
    after = {place: place.stat().st_mtime_ns for place in (tmp_path / "out" / "trial" / "cells").rglob("*.parquet")}
    assert after == cells, "nothing is measured again"
    assert len(loaded(tmp_path).results.confirmations) == 1, "running again is no second look"


@pytest.mark.slow
def test_completions_are_judged_and_prompting_is_compared(steerlab, write, tmp_path):
    judge = {"rubric": {"a": "{text} Rating:", "b": "{prompt} {text} Rating:"}, "scale": {"no": 0, "yes": 1}}
    generations = {"prompts": ["The soup was"], "max_new_tokens": 3, "doses": [0, 0.1], "judge": judge}
    baselines = {"prompting": ["Be happy.", "Be very happy."], "few_shot": ["All is well."], "ratios": [1000]}
    path = write({"generations": generations, "baselines": baselines, "report": "page.md"})
    first = steerlab("run", path)
    assert first.code == 0, (first.err, first.exception)
    assert "rating at +0.1" in first.out
    assert "nothing is extrapolated" in first.out
    results = loaded(tmp_path).results
    (judged,), (beside,) = results.judgements, results.baselines
    assert dict(zip(judged.judge.labels, judged.judge.values, strict=True)) == {"no": 0.0, "yes": 1.0}
    assert [arm.strengths for arm in beside.arms] == [(1.0, 2.0), (1.0,)]
    page = (tmp_path / "page.md").read_text()
    assert "Judged completions" in page
    assert "Be very happy." in page


@pytest.mark.slow
def test_several_vectors_are_each_measured_and_counted(steerlab, write, tmp_path, vector_file):
    vectors = {
        "mean": {"layers": [1, 2]},
        "kept": {"file": str(vector_file)},
        "own": {"layer": 1, "pairs": {"path": "pairs.jsonl", "positive": "negative", "negative": "positive"}},
    }
    done = steerlab("run", write({"vector": None, "vectors": vectors, "controls": {"random": 4}, "report": True}))
    assert done.code == 0, (done.err, done.exception)
    exp = loaded(tmp_path)
    assert [effect.comparisons.n_tested for effect in exp.effects if effect.comparisons] == [4] * 4
    assert done.out.count("4 plans were tested on these items with this metric") == 4
    for title in ("mean, layer 1", "mean, layer 2", "kept", "own"):
        assert f"\n{title}\n" in done.out
    assert (tmp_path / "out" / "trial" / "report.html").is_file()
    assert [len(found) for found in exp.results.vectors] == [2, 1]


@pytest.mark.slow
def test_overwrite_and_another_configuration(steerlab, write, tmp_path):
    assert steerlab("run", write()).code == 0
    note = tmp_path / "out" / "trial" / "notes.txt"
    note.write_text("mine")
    refused = steerlab("run", write({"seed": 1}))
    assert refused.code == 2
    assert "name: " in refused.err
    assert "holds a run of another configuration: seed 0 there, 1 here" in refused.err
    assert "--overwrite" in refused.err
    assert steerlab("run", write({"seed": 1}), "--overwrite").code == 0
    assert loaded(tmp_path).seed == 1
    assert note.read_text() == "mine"


@pytest.mark.slow
def test_a_failed_selfcheck_stops_unless_it_is_allowed(steerlab, write, tmp_path):
    strict = {"selfcheck": {"tolerance": 1e-30}}
    stopped = steerlab("run", write(strict))
    assert stopped.code == 2
    assert ": selfcheck: The selfcheck of LensEngine" in stopped.err
    assert not list((tmp_path / "out" / "trial").rglob("effects/*"))
    allowed = steerlab("run", write({"selfcheck": {"tolerance": 1e-30, "allow_failure": True}}))
    assert allowed.code == 0
    assert "selfcheck FAILED" in allowed.out
    assert not loaded(tmp_path).results.selfchecks[-1].passed
