"""The shipped table of families: every model family in it is compared with plain Hugging Face, steered and not."""

import pytest

import steerlab as sl
from scripts.family_table import as_markdown
from steerlab.engines._doctor import examine
from steerlab.engines.lens import _backends as backends
from steerlab.models.families import ENGINES, FEATURES, TABLE, checks, families
from tests.docs.pages import ROOT
from tests.tiny_families import MODELS, build_family

FEATURES_COMPARED = ("edit", "capture", "score")


def test_the_table_has_the_families_that_are_compared_here():
    assert set(families()) == set(MODELS)
    assert len(families()) >= 27
    assert TABLE.is_file()


def test_every_cell_says_how_or_why():
    for family in families().values():
        for (engine, feature), cell in family.cells.items():
            assert (engine in ENGINES, feature in FEATURES) == (True, True)
            if cell.state == "checked":
                assert set(cell.note.split(", ")) <= set(checks())
            assert bool(cell.note) == (cell.state != "open")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*fast path is not available.*")
@pytest.mark.filterwarnings("ignore:A short comparison on this model found:UserWarning")
def test_a_family_is_what_plain_hugging_face_is(name, tmp_path):
    cells = families()[name].cells
    path = build_family(tmp_path, name)
    findings = examine(path)
    lens = [one for one in findings if one.engine == "bridge"]
    assert {one.what for one in lens} == {
        *(f"{what}, {kind}" for what in ("streams", "scores") for kind in ("unsteered", "steered")),
        "logits",
    }
    assert [one for one in lens if one.state != "same"] == []
    assert {cells["bridge", feature].state for feature in FEATURES_COMPARED} == {"checked"}
    (fast,) = (one for one in findings if one.engine == "fast")
    expected = "checked" if fast.state == "same" else "refused"
    assert {cells["fast", feature].state for feature in FEATURES_COMPARED} == {expected}, fast.detail
    (graph,) = (one for one in findings if one.engine == "graph")
    assert cells["graph", "edit"].state == ("checked" if graph.state == "same" else "refused"), graph.detail


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_generation_runs_where_the_table_says(name, tmp_path, recwarn):
    with sl.load(build_family(tmp_path, name), device="cpu") as engine:
        ran = engine.generate([[5, 60, 7]], policy=sl.SamplingPolicy.greedy(), max_new_tokens=2).engine
        assert ran == ("fast" if families()[name].cells["fast", "edit"].state == "checked" else "bridge")
        assert (backends.fast_difference(engine.model) is None) == (ran == "fast")


def test_an_edit_that_is_half_as_strong_is_found(tmp_path, monkeypatch):
    from steerlab.engines import _doctor as doctor

    original = doctor.PlainModel.run

    def weaker(self, ids, plan):
        if plan is not None:
            vector = plan.edits[0].vector
            plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(0.5 * vector.values, layer=vector.layer), coef=1.0))
        return original(self, ids, plan)

    monkeypatch.setattr(doctor.PlainModel, "run", weaker)
    found = examine(build_family(tmp_path, "llama"))
    assert {one.what for one in found if one.state == "differs"} == {"streams, steered", "scores, steered"}


def test_the_page_shows_the_table():
    assert as_markdown() in (ROOT / "docs" / "models.md").read_text()
