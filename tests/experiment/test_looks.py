"""Every call that measures on items is a look at them, in any run of the folder; a confirmation says which it is."""

from pathlib import Path

import pytest
import torch

import steerlab as sl
from steerlab.core.errors import InputError, SteerlabError
from tests.experiment.data import DEV, HELD_OUT, TARGETS

DOSES = [-0.2, 0.0, 0.2]
FEW = {"controls": sl.Controls(random=0), "neutral": ["the cat ran home and sat down"]}


def vector(seed: int = 0, layer: int = 1) -> sl.SteeringVector:
    return sl.SteeringVector.from_tensor(
        torch.randn(64, generator=torch.Generator().manual_seed(seed)), layer=layer, name=f"v{seed}"
    )


PLAN = sl.Plan(sl.add(vector(), dose=1.0))


def opened(engine: sl.LensEngine, root: Path | None) -> sl.Experiment:
    return sl.Experiment("run", engine, root=root)


def confirmed(exp: sl.Experiment, **options: object) -> object:
    return exp.confirm(exp.select(vector(), [0.1, 0.2], DEV), HELD_OUT, **options)


def fail(positive: object, negative: object) -> float:
    raise InputError("no value")


@pytest.mark.parametrize("kept", [True, False])
def test_effects_on_held_out_items_count(tiny_llama_engine: sl.LensEngine, tmp_path: Path, kept: bool) -> None:
    exp = opened(tiny_llama_engine, tmp_path if kept else None)
    for _ in range(3):
        exp.effect(PLAN, HELD_OUT, DOSES, **FEW)
    found = confirmed(exp)
    assert found.look == 4
    assert "This is look 4 at these held-out items" in str(found)
    assert confirmed(exp).look == 4, "the same confirmation again is the one that is kept"
    text = exp.report(tmp_path / "report.md").read_text()
    assert "4 looks at the same held-out items" in text
    assert "measured on by 3 × effect, 1 × confirm" in text
    exp.close()


def test_the_same_call_on_other_items_is_another_look_also_in_a_later_run(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path
) -> None:
    for items in (HELD_OUT, DEV, HELD_OUT):
        with opened(tiny_llama_engine, tmp_path) as exp:
            exp.effect(PLAN, items, DOSES, **FEW)
    assert len(exp.looks) == 2, "the third call was the first one again"


def test_looks_of_earlier_runs_of_the_folder_count_and_their_repetition_does_not(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path
) -> None:
    for doses in (DOSES, DOSES, [0.0, 0.1, 0.3]):
        with opened(tiny_llama_engine, tmp_path) as exp:
            exp.effect(PLAN, HELD_OUT, doses, **FEW)
    with opened(tiny_llama_engine, tmp_path) as exp:
        assert confirmed(exp).look == 3
        assert exp.verify(n=0).ok
    with opened(tiny_llama_engine, tmp_path) as exp:
        exp.effect(PLAN, HELD_OUT, DOSES, **FEW)
        assert confirmed(exp).look == 3
    assert len(sl.Experiment.load(tmp_path / "run").looks) == 4, "two effects, a selection, a confirmation"


CALLS = {
    "score": lambda exp: exp.score(PLAN, HELD_OUT),
    "score, unsteered": lambda exp: exp.score(None, HELD_OUT),
    "select": lambda exp: exp.select(vector(1), [0.1], HELD_OUT),
    "interaction": lambda exp: exp.interaction(PLAN, sl.Plan(sl.ablate(vector(1, 2))), HELD_OUT),
    "transfer": lambda exp: exp.transfer(PLAN, HELD_OUT, [0, 0.2]),
    "entropy": lambda exp: exp.entropy(PLAN, HELD_OUT.prompts),
    "entropy of whole texts": lambda exp: exp.entropy(PLAN, ["the goat ran"]),
    "cost": lambda exp: exp.cost(PLAN, ["a stone", *HELD_OUT.prompts]),
    "cost of completions": lambda exp: exp.cost(PLAN, ["a stone"], prompts=HELD_OUT.prompts, max_new_tokens=2),
    "generate": lambda exp: exp.generate(PLAN, HELD_OUT.prompts[0], max_new_tokens=2),
    "parity": lambda exp: exp.parity(PLAN, HELD_OUT.prompts, against=exp.engine, max_new_tokens=2),
    "neutral text": lambda exp: exp.effect(
        PLAN, TARGETS, DOSES, controls=sl.Controls(random=0), neutral=HELD_OUT.prompts
    ),
    "neutral text from a generator": lambda exp: exp.effect(
        PLAN, TARGETS, DOSES, controls=sl.Controls(random=0), neutral=(prompt for prompt in HELD_OUT.prompts)
    ),
    "one neutral text": lambda exp: exp.effect(
        PLAN, TARGETS, DOSES, controls=sl.Controls(random=0), neutral=HELD_OUT.prompts[0]
    ),
    "some of them": lambda exp: exp.score(None, HELD_OUT.take([1])),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_on_them_is_a_look(tiny_llama_engine: sl.LensEngine, name: str) -> None:
    exp = opened(tiny_llama_engine, None)
    CALLS[name](exp)
    assert confirmed(exp).look == 2


def test_calls_on_other_items_are_none(tiny_llama_engine: sl.LensEngine) -> None:
    exp = opened(tiny_llama_engine, None)
    exp.effect(PLAN, TARGETS, DOSES, **FEW)
    exp.generate(PLAN, TARGETS.prompts, max_new_tokens=2)
    assert confirmed(exp).look == 1


def test_a_search_that_finds_nothing_has_looked_and_a_call_that_is_refused_has_not(
    tiny_llama_engine: sl.LensEngine,
) -> None:
    exp = opened(tiny_llama_engine, None)
    with pytest.raises(InputError, match="satisfies the constraints"):
        exp.select(vector(1), [0.4], HELD_OUT, subject_to={"ppl_ratio": 0.0}, texts=["the cat ran home"])
    for refused in (
        lambda: exp.effect(PLAN, HELD_OUT, [0.1], **FEW),
        lambda: exp.effect("plan", HELD_OUT, DOSES, **FEW),
        lambda: exp.score("plan", HELD_OUT),
        lambda: exp.transfer(PLAN, HELD_OUT, [0]),
    ):
        with pytest.raises(SteerlabError):
            refused()
    assert confirmed(exp).look == 2


def test_a_confirmation_that_broke_off_is_not_counted_against_itself(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = opened(tiny_llama_engine, tmp_path)
    best = exp.select(vector(), [0.1], DEV)
    with monkeypatch.context() as broken:
        broken.setattr("steerlab.experiment.measurements.confirmation.cluster_t_mean", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            exp.confirm(best, HELD_OUT)
    assert [look.kind for look in exp.looks] == ["select", "confirm"]
    assert exp.confirm(best, HELD_OUT).look == 1
    assert [look.kind for look in exp.looks] == ["select", "confirm"]
    exp.close()


def test_a_run_started_anew_begins_to_count_anew(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    with opened(tiny_llama_engine, tmp_path) as exp:
        exp.score(None, HELD_OUT)
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path, overwrite=True) as exp:
        assert confirmed(exp).look == 1
