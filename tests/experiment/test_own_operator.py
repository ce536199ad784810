"""An experiment with an operator of a user's own: controls at once, everything that reads a run after registration."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

import steerlab as sl
from steerlab.core.errors import RunError, UnknownOperatorError
from steerlab.steering.operators import Ablate, registry
from steerlab.steering.operators._edit import Edit
from tests.experiment.data import DEV, PAIRS, TARGETS, TEXTS

OPTIONS: dict[str, Any] = {"neutral": TEXTS, "max_ppl_ratio": 50.0}


class Forget(Ablate):
    """Ablation under another name."""

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "forget"}


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_READERS", {})


@pytest.fixture
def controls() -> sl.Controls:
    with pytest.warns(UserWarning, match="cannot rank below"):
        return sl.Controls(random=2, shuffled=2, wrong_layer=True)


def measured(exp: sl.Experiment, controls: sl.Controls, targets: sl.Targets = TARGETS) -> sl.Effect:
    vector = exp.extract(PAIRS, layers=[1])[1]
    plan = sl.Plan(Edit(Forget(), vector, sl.where.default()))
    return exp.effect(plan, targets, [0, 0.5, 1], controls=controls, pairs=PAIRS, **OPTIONS)


@pytest.mark.parametrize("root", [True, None])
def test_controls_need_no_registration(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, controls: sl.Controls, root: bool | None
) -> None:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path if root else None) as exp:
        effect = measured(exp, controls)
        assert set(effect.rows.family) == {"vector", "random", "shuffled", "wrong_layer"}
        assert set(measured(exp, controls, DEV).rows.family) == set(effect.rows.family), "arms known in this process"
        own = exp.effect(sl.Plan(sl.ablate(exp.extract(PAIRS, layers=[1])[1])), TARGETS, [0, 0.5, 1], **OPTIONS)
    ablated = own.rows[own.rows.family == "vector"].value.tolist()
    assert effect.rows[effect.rows.family == "vector"].value.tolist() == ablated, "the same map under another name"


def test_a_run_is_read_after_registration(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, controls: sl.Controls
) -> None:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        before = measured(exp, controls)
        found = exp.verify(n=0)
    with pytest.raises(UnknownOperatorError, match=r"sl\.register_operator\('forget'"):
        _ = sl.Experiment.load(exp.path).effects
    (failure,) = found.failures.to_dict("records")
    plans = sorted(exp.path.glob("inputs/plans/*.json"))
    assert len(plans) > 2
    assert failure["check"] == "input"
    assert failure["item"] == f"inputs/plans/{plans[0].name} and {len(plans) - 1} more ({len(plans)} in all)"
    assert failure["detail"].startswith("not read, which says nothing about damage: Unknown operator 'forget'")
    assert str(found).count("register_operator") == 1

    sl.register_operator("forget", lambda data, hook_point: Forget())
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as again:
        after = measured(again, controls)
        assert again._session.cells.measured == 0
        assert again.verify(n=5).ok
    assert after.rows.equals(before.rows)
    assert sl.Experiment.load(exp.path).effects[0].slope == before.slope
    assert sl.compare(exp.path, exp.path).differences.empty


def test_reruns_without_registration_are_told_of_once(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, controls: sl.Controls
) -> None:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        measured(exp, controls)
        found = exp.verify(n=1000).failures
    assert found["check"].tolist() == ["input", "rerun"]
    assert found.detail.str.startswith("not read, which says nothing about damage").all()


# --- code that changed under one description ----------------------------------------------------------------------


class Halve(Ablate):
    """Half an ablation; what is edited in these tests."""

    version = 1

    @override
    def delta(self, h: torch.Tensor, along: Any) -> torch.Tensor:
        return -0.5 * (h @ along.unit)[..., None] * along.unit

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "halve", "version": self.version}


def reversed_delta(self: Halve, h: torch.Tensor, along: Any) -> torch.Tensor:
    return 2 * (h @ along.unit)[..., None] * along.unit


def halved(exp: sl.Experiment, factor: float = 1.0) -> float:
    vector = exp.extract(PAIRS, layers=[1])[1]
    plan = sl.Plan(Edit(Halve(), vector, sl.where.default())).scaled(factor)
    return exp.effect(plan, TARGETS, [0, 0.5, 1], controls=sl.Controls(random=0), **OPTIONS).slope


@pytest.mark.parametrize("root", [True, None])
def test_changed_code_never_gets_what_was_measured_before(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool | None
) -> None:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path if root else None) as exp:
        before = halved(exp)
        assert halved(exp) == before
        monkeypatch.setattr(Halve, "delta", reversed_delta)
        refusal = r"^The operator Halve \({'kind': 'halve', 'version': 1}\) .*Halve\.delta changed.*overwrite=True"
        with pytest.raises(RunError, match=refusal):
            halved(exp)
        with pytest.raises(RunError, match=refusal):
            halved(exp, factor=2.0)  # at half its scale, it is the plan above at scale 1
        monkeypatch.setattr(Halve, "version", 2)
        assert abs(halved(exp) - before) > 1e-6


def test_changed_code_is_noticed_when_a_run_is_resumed(
    tiny_llama_engine: sl.LensEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sl.register_operator("halve", lambda data, hook_point: Halve())
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        before = halved(exp)
        assert exp.verify(n=2).ok
    (kept,) = exp.path.glob("inputs/operators/*.json")
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as again:
        assert halved(again) == before
        assert again._session.cells.measured == 0
        monkeypatch.setattr(Halve, "delta", reversed_delta)
        with pytest.raises(RunError, match=r"Halve\.delta changed, and its description did not"):
            halved(again)
        assert not again.verify(n=5).ok, "the model says something else under the new code"
        assert set(again.verify(n=5).failures["check"]) == {"rerun"}
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path, overwrite=True) as anew:
        assert abs(halved(anew) - before) > 1e-6
    kept.write_text(kept.read_text().replace('"halve"', '"other"'))
    failures = sl.Experiment.load(exp.path).verify(n=0).failures
    assert failures["check"].tolist() == ["file", "input"]
    assert "holds another operator" in failures.detail[1]


def test_shipped_operators_leave_nothing_beside_their_plans(tiny_llama_engine: sl.LensEngine, tmp_path: Path) -> None:
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as exp:
        plan = sl.Plan(sl.ablate(exp.extract(PAIRS, layers=[1])[1]))
        exp.effect(plan, TARGETS, [0, 0.5, 1], controls=sl.Controls(random=0), **OPTIONS)
    assert {path.name for path in (exp.path / "inputs").iterdir()} == {"plans", "data"}
