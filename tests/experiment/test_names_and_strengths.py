"""Vectors are told apart by name, and what is said of strengths, edited tokens and bytes is what ran."""

from pathlib import Path

import pandas as pd
import pytest
import torch

import steerlab as sl
from tests.experiment.data import PAIRS, TARGETS


def vector(name: str | None, seed: int = 0) -> sl.SteeringVector:
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=1, name=name)


BOTH = sl.Plan(sl.add(vector("joy"), dose=0.1), sl.add(vector("grief", 1), dose=0.2))


def test_bits_per_byte_is_the_engine_s_and_survives_reading_back(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path
) -> None:
    plan = sl.Plan(sl.add(vector(None), coef=1.0))
    direct = tiny_llama_engine.score(TARGETS.prompts, [item.targets for item in TARGETS], plan=plan).bits_per_byte
    for _ in range(2):
        with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
            assert exp.score(plan, TARGETS).bits_per_byte == pytest.approx(direct, rel=1e-5)
            assert exp.verify(n=1).ok


def test_a_cell_without_bytes_is_still_read(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    before = exp.score(None, TARGETS)
    (place,) = (place for place in exp._session.cells.stored() if "score_rows" in place)
    stored = exp._session.cells.read(place)
    exp._session.cells.add(stored.cell, stored.engine_hash, stored.frame.drop(columns="num_bytes"))
    again = exp.score(None, TARGETS)
    assert again.log_prob.tolist() == before.log_prob.tolist()
    assert pd.isna(again.bits_per_byte).all()
    assert exp.verify(n=1).ok
    exp.close()


@pytest.mark.parametrize(
    ("edit", "scale", "told"),
    [
        (sl.add(vector(None), dose=1.0), 0.2, "add(dose=0.2)"),
        (sl.add(vector(None), coef=3.0), -0.5, "add(coef=-1.5)"),
        (sl.add(vector(None), dose=1.0), 1.0, "add(dose=1)"),
        (sl.ablate(vector(None)), 0.5, "ablate() × 0.5"),
    ],
)
def test_receipts_state_the_strength_that_ran(
    tiny_llama_engine: sl.LensEngine, edit: object, scale: float, told: str
) -> None:
    tiny_llama_engine.score(["the cat"], [[" ran"]], plan=sl.Plan(edit).scaled(scale))
    assert tiny_llama_engine.receipts[0].edits[0].operator == told


def test_rows_at_dose_0_have_no_edited_tokens(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    exp = sl.Experiment("run", tiny_llama_engine, root=None)
    effect = exp.effect(BOTH, TARGETS, [0, 1], controls=sl.Controls(random=0), neutral=["the cat ran home"])
    edited = effect.rows.groupby("dose").edited_tokens.agg(["min", "max"])
    assert edited.loc[0.0].tolist() == [0, 0]
    assert edited.loc[1.0, "min"] > 0


def test_names_are_in_words_and_not_in_the_identity(tiny_llama_engine: sl.LensEngine) -> None:
    renamed = sl.Plan(sl.add(vector("gaiety"), dose=0.1), sl.add(vector(None, 1), dose=0.2))
    assert renamed.hash == BOTH.hash
    lines = BOTH.describe().splitlines()
    assert ["'joy'" in line for line in lines] == [True, False]
    assert ["'grief'" in line for line in lines] == [False, True]
    assert sl.Plan.from_json(BOTH.to_json()).describe() == BOTH.describe()
    assert "'joy'" in str(sl.explain(BOTH, [5, 6, 7]))
    both = tiny_llama_engine.score(["the cat"] * 2, [[" ran"]] * 2, plan=[BOTH, renamed])
    assert both.log_prob[0] == pytest.approx(both.log_prob[1], abs=1e-6)
    named = [[edit.vector for edit in receipt.edits] for receipt in tiny_llama_engine.receipts]
    assert named == [["joy", "grief"], ["gaiety", None]]


def test_further_vectors_of_an_edit_are_named() -> None:
    when = sl.when(vector("probe", 2), above=0.0)
    edit = sl.rotate(vector("joy"), toward=vector("grief", 1), angle=0.5, when=when)
    assert [v.name for v in edit.vectors] == ["joy", "grief", "probe"]
    for part in ("along 'joy'", "toward 'grief'", "of 'probe'"):
        assert part in str(edit)
    again = sl.Plan.from_json(sl.Plan(edit).to_json())
    assert (again, str(again.edits[0])) == (sl.Plan(edit), str(edit))
    assert [v.card for v in again.edits[0].vectors] == [v.card for v in edit.vectors]


def test_effects_and_reports_name_vectors_made_elsewhere(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    exp = sl.Experiment("run", tiny_llama_engine, root=tmp_path)
    options = {"controls": sl.Controls(random=19), "neutral": ["the cat ran home"], "max_ppl_ratio": 99.0}
    made = sl.extract(tiny_llama_engine, PAIRS, layers=[1], name="elsewhere")[1]
    own = exp.extract(PAIRS, layers=[2], name="own")[2]
    for v in (made, own, vector("joy")):
        effect = exp.effect(sl.Plan(sl.add(v, dose=1.0)), TARGETS, [0, 0.1, 0.2], **options)
        assert effect.vector == v.name
        assert f"vector {v.name}" in str(effect)
    stored = [exp._session.inputs.plan(h) for h in exp._session.cells.read(arms_cell(exp)).frame.plan_hash]
    assert {plan.edits[0].vector.name for plan in stored} == {"joy: random_direction"}
    text = exp.report(tmp_path / "report.md").read_text()
    section = text[text.index("## Vectors") :]
    for v in (made, own, vector("joy")):
        assert section.count(f"| {v.name} |") == 1
        assert f"'{v.name}'" in text
    exp.close()


def arms_cell(exp: sl.Experiment) -> str:
    wanted = exp.results.effects[-1][1].hash
    arms = [place for place in exp._session.cells.stored() if "/arms/" in place]
    return next(place for place in arms if exp._session.cells.read(place).cell.what["plan"] == wanted)
