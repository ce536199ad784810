"""An experiment with an operator of a user's own: controls at once, everything that reads a run after registration."""

from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import steerlab as sl
from steerlab.core.errors import UnknownOperatorError
from steerlab.steering import registry
from steerlab.steering.edit import Edit
from steerlab.steering.projection import Ablate
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
    assert set(found.failures["check"]) == {"input"}
    assert found.failures.detail.str.contains("register_operator").all()

    sl.register_operator("forget", lambda data, hook_point: Forget())
    with sl.Experiment("run", tiny_llama_engine, root=tmp_path) as again:
        after = measured(again, controls)
        assert again._session.cells.measured == 0
        assert again.verify(n=5).ok
    assert after.rows.equals(before.rows)
    assert sl.Experiment.load(exp.path).effects[0].slope == before.slope
    assert sl.compare(exp.path, exp.path).differences.empty
