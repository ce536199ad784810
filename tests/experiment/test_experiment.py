import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

import steerlab as sl
from steerlab.core.errors import InputError, PolicyError, RunError

PAIRS = sl.ContrastPairs.from_lists(
    ["the cat ran home", "a dog sat down", "the bird flew off", "a fish swam by"],
    ["the cat ran away", "a dog stood up", "the bird came back", "a fish swam on"],
    ["x", "x", "y", "y"],
)
TARGETS = sl.Targets.from_records(
    [
        {"prompt": prompt, "target": target, "label": label, "group": group}
        for prompt, group in [("the cat", "a"), ("a dog", "a"), ("the bird", "b"), ("a fish", "c")]
        for target, label in [(" ran", 1), (" sat down", 1), (" flew off", -1)]
    ]
)
TEXTS = ["the cat ran home and the dog sat down", "a bird flew off"]
DOSES = [-0.2, 0.0, 0.1, 0.2]


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine: sl.LensEngine, tmp_path_factory: pytest.TempPathFactory) -> sl.Experiment:
    exp = sl.Experiment("tiny", tiny_llama_engine, root=tmp_path_factory.mktemp("runs"), seed=3)
    vectors = exp.extract(PAIRS, layers=[1])
    plan = sl.Plan(sl.add(vectors[1], dose=1.0))
    controls = sl.Controls(random=19, shuffled=19, wrong_layer=True)
    exp.effect(plan, TARGETS, DOSES, controls=controls, pairs=PAIRS, neutral=TEXTS, max_ppl_ratio=50.0)
    exp.entropy(plan.scaled(0.2), TEXTS)
    exp.cost(plan, TEXTS, doses=[0, 0.2])
    exp.generate(plan, ["the cat", "a dog"], doses=[0, 0.2], max_new_tokens=6)
    return exp


def test_rows_hold_every_arm_dose_and_item(experiment: sl.Experiment) -> None:
    rows = experiment.effects[0].rows
    assert len(rows) == len(TARGETS) * (len(DOSES) + 2 * (19 + 19 + 1))
    assert not rows.isna().any().any()
    assert isinstance(rows.index, pd.RangeIndex)
    assert rows.groupby(["family", "draw", "dose"]).size().eq(len(TARGETS)).all()


def test_values_are_margins_of_exact_scores(experiment: sl.Experiment) -> None:
    effect, plan = experiment.results.effects[0]
    scores = experiment.score(plan.scaled(0.2), TARGETS)
    by_item = scores.log_prob.reshape(len(TARGETS), 3)
    margins = by_item[:, :2].mean(axis=1) - by_item[:, 2]
    real = effect.rows.query("family == 'vector' and dose == 0.2")
    assert real.value.to_numpy() == pytest.approx(margins, abs=1e-5)


def test_dose_zero_is_the_unsteered_model(experiment: sl.Experiment) -> None:
    scores = experiment.score(None, TARGETS).log_prob.reshape(len(TARGETS), 3)
    base = experiment.effects[0].rows.query("family == 'vector' and dose == 0")
    assert base.value.to_numpy() == pytest.approx(scores[:, :2].mean(axis=1) - scores[:, 2], abs=1e-5)
    assert experiment.effects[0].cost.set_index("dose").ppl_ratio[0.0] == 1.0


def test_the_axis_says_what_the_doses_are(experiment: sl.Experiment) -> None:
    vector = experiment.results.vectors[0][1]
    assert experiment.effects[0].settings.axis == "dose"
    options = {"controls": sl.Controls(random=0), "neutral": TEXTS}
    other = sl.Experiment("other", experiment.engine, root=None)
    assert other.effect(sl.Plan(sl.add(vector, dose=0.2)), TARGETS, [0, 1], **options).settings.axis == "scale"
    assert other.effect(sl.Plan(sl.ablate(vector)), TARGETS, [0, 1], **options).settings.axis == "scale"


def test_a_vector_from_pairs_is_told_that_its_labels_were_not_asked_about(experiment: sl.Experiment) -> None:
    extracted = experiment.results.vectors[0][1]
    made = sl.SteeringVector.from_tensor(extracted.values, layer=1, model=experiment.engine.info)
    other = sl.Experiment("other", experiment.engine, root=None)
    controls = sl.Controls(random=19)

    def unasked(vector: sl.SteeringVector) -> list[str]:
        plan = sl.Plan(sl.add(vector, dose=1.0))
        effect = other.effect(plan, TARGETS, DOSES, controls=controls, neutral=TEXTS, max_ppl_ratio=50.0)
        return [reason for reason in effect.reasons if "Only random directions were asked" in reason]

    assert len(unasked(extracted)) == 1
    assert unasked(made) == []
    assert not any("Only random" in reason for reason in experiment.effects[0].reasons), "its flips were run"


def test_seeds_repeat_a_whole_effect(experiment: sl.Experiment) -> None:
    again = sl.Experiment("again", experiment.engine, seed=3, root=None)
    plan = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=1.0))
    controls = sl.Controls(random=19, shuffled=19, wrong_layer=True)
    effect = again.effect(plan, TARGETS, DOSES, controls=controls, pairs=PAIRS, neutral=TEXTS, max_ppl_ratio=50.0)
    pd.testing.assert_frame_equal(effect.rows, experiment.effects[0].rows)
    assert effect.summary() == experiment.effects[0].summary()


def test_generations_are_paired_by_seed(experiment: sl.Experiment) -> None:
    frame = experiment.results.generations[0]
    assert frame.dose.tolist() == [0.0, 0.2, 0.0, 0.2]
    alone = experiment.engine.generate(
        ["the cat", "a dog"], policy=sl.SamplingPolicy(temperature=0.7, top_p=0.9), max_new_tokens=6, seed=3
    )
    assert frame[frame.dose == 0].text.tolist() == alone.texts


def test_entropy_is_measured_on_the_same_tokens(experiment: sl.Experiment) -> None:
    frame = experiment.results.entropies[0]
    ids = [experiment.engine.tokenizer(text)["input_ids"] for text in TEXTS]
    assert frame.token_id.tolist()[-1] == ids[1][-1]
    assert (frame[["base", "steered"]] >= 0).all().all()
    assert not np.allclose(frame.base, frame.steered)


def test_save_and_load_give_the_same_experiment(experiment: sl.Experiment) -> None:
    path = experiment.save()
    loaded = sl.Experiment.load(path)
    assert loaded.effects[0].summary() == experiment.effects[0].summary()
    pd.testing.assert_frame_equal(loaded.effects[0].rows, experiment.effects[0].rows)
    assert loaded.results.effects[0][1] == experiment.results.effects[0][1]
    assert loaded.results.vectors[0][1] == experiment.results.vectors[0][1]
    for kind in ("costs", "entropies", "generations"):
        pd.testing.assert_frame_equal(getattr(loaded.results, kind)[0], getattr(experiment.results, kind)[0])
    records = json.loads((path / "run.json").read_text())["records"]
    assert [record["kind"] for record in records] == ["vectors", "effect", "entropy", "cost", "generations"]
    assert not list(path.rglob("*.tmp"))


def test_another_configuration_does_not_go_on_with_a_run(experiment: sl.Experiment, tmp_path: Path) -> None:
    first = sl.Experiment("run", experiment.engine, root=tmp_path)
    first.cost(sl.Plan(), TEXTS)
    first.close()
    with pytest.raises(RunError, match=r"seed 0 there, 1 here.*overwrite=True"):
        sl.Experiment("run", experiment.engine, root=tmp_path, seed=1)
    assert sl.Experiment.load(first.path).results.costs
    other = sl.Experiment("run", experiment.engine, root=tmp_path, seed=1, overwrite=True)
    assert sl.Experiment.load(first.path).results.costs, "nothing is replaced before something is measured"
    other.save()
    assert not sl.Experiment.load(first.path).results.costs
    assert not (first.path / "cells").exists()


def test_how_the_model_was_loaded_is_kept(tmp_path: Path, tiny_llama_path: Path) -> None:
    sl.Experiment("half", tiny_llama_path, root=tmp_path, dtype="bfloat16", device="cpu").save()
    assert sl.Experiment.load(tmp_path / "half").engine.info.dtype == "bfloat16"


def test_long_neutral_text_is_cut_into_windows(experiment: sl.Experiment) -> None:
    plan = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=0.1))
    cost = sl.Experiment("long", experiment.engine, root=None).cost(plan, [" the cat ran home" * 300])
    assert cost.num_tokens.iloc[0] > experiment.engine.info.context_length


def test_a_saved_run_reports_without_the_model(experiment: sl.Experiment, tmp_path: Path) -> None:
    loaded = sl.Experiment.load(experiment.save())
    page = loaded.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert not loaded._session.loaded
    assert not re.search(r"(src|href)=[\"'](?!data:|#)", page)
    assert loaded.effects[0].verdict in page
    assert experiment.effects[0].plan_hash in page
    assert "log-probabilities in nats, computed in float32" in page


def test_text_in_a_report_is_escaped(experiment: sl.Experiment, tmp_path: Path) -> None:
    loaded = sl.Experiment.load(experiment.save())
    loaded.results.generations[0].loc[0, "text"] = "<script>alert(1)</script>"
    page = loaded.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in page


def test_a_report_needs_a_measurement(tiny_llama_engine: sl.LensEngine) -> None:
    with pytest.raises(RunError, match="measure something first"):
        sl.Experiment("empty", tiny_llama_engine, root=None).report()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.json"):
        sl.Experiment.load(tmp_path)


def test_a_damaged_run_is_refused(experiment: sl.Experiment) -> None:
    rows = experiment.path / "effects" / "000" / "rows.parquet"
    whole = rows.read_bytes()
    rows.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(RunError, match=r"rows\.parquet"):
        sl.Experiment.load(experiment.path)
    rows.write_bytes(whole)


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_names_become_folders(name: str) -> None:
    with pytest.raises(InputError, match="folder"):
        sl.Experiment(name)


@pytest.mark.parametrize("doses", [[0.1], [0.1, 0.1], [0.0, float("nan")], ["0.1", "0"], 0.2])
def test_doses_are_checked(experiment: sl.Experiment, doses: Any) -> None:
    plan = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=1.0))
    with pytest.raises(InputError, match="distinct finite"):
        experiment.effect(plan, TARGETS, doses)


def test_what_is_no_targets_and_no_controls_is_named(experiment: sl.Experiment) -> None:
    plan, wrong = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=1.0)), cast("Any", experiment.effect)
    with pytest.raises(InputError, match="targets is a Targets"):
        wrong(plan, [{"prompt": "x"}], DOSES)
    with pytest.raises(InputError, match="controls is e"):
        wrong(plan, TARGETS, DOSES, controls=20)


def test_one_bare_prompt_is_one_prompt(experiment: sl.Experiment) -> None:
    plan = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=0.1))
    frame = sl.Experiment("bare", experiment.engine, root=None).generate(plan, "the cat ran", max_new_tokens=2)
    assert frame.prompt.tolist() == ["the cat ran"] * 2


def test_entropy_refuses_a_penalty_it_cannot_apply(experiment: sl.Experiment) -> None:
    plan = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=0.1))
    with pytest.raises(PolicyError, match="repetition_penalty"):
        experiment.entropy(plan, TEXTS, policy=sl.SamplingPolicy(repetition_penalty=2.0))


def test_no_bound_on_the_cost_survives_saving(experiment: sl.Experiment, tmp_path: Path) -> None:
    exp = sl.Experiment("unbounded", experiment.engine, root=tmp_path)
    plan = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=1.0))
    options = {"controls": sl.Controls(random=0), "neutral": TEXTS}
    exp.effect(plan, TARGETS, DOSES, max_ppl_ratio=float("inf"), **options)
    assert sl.Experiment.load(exp.save()).effects[0].settings.max_ppl_ratio == float("inf")
    with pytest.raises(InputError, match="max_ppl_ratio"):
        exp.effect(plan, TARGETS, DOSES, max_ppl_ratio=float("nan"), **options)
    with pytest.raises(InputError, match="item 0"):
        exp.effect(plan, TARGETS, DOSES, metric=lambda p, n: float("nan"), **options)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "damaged"),
        ("null", "damaged"),
        ("{", "cannot be read"),
        ('{"format": 2}', "lacks"),
        ('{"format": 1}', "1"),
    ],
)
def test_a_run_file_that_is_not_one_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=complaint):
        sl.Experiment.load(tmp_path)


def test_a_dose_is_measured_on_the_model_it_runs_on(experiment: sl.Experiment, tiny_gpt2_engine: sl.LensEngine) -> None:
    plan = sl.Plan(sl.add(experiment.results.vectors[0][1], dose=1.0))
    own = plan.edits[0].median_norm
    elsewhere = plan.resolved(tiny_gpt2_engine.median_norm, tiny_gpt2_engine.info.weights_hash)
    assert plan.resolved(experiment.engine.median_norm, experiment.engine.info.weights_hash) == plan
    assert elsewhere.edits[0].median_norm == tiny_gpt2_engine.median_norm(1) != own
