"""Operators of a user's own, read back from JSON once they are registered."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from typing_extensions import override

import steerlab as sl
from steerlab.core.errors import PlanError, UnknownOperatorError
from steerlab.core.hook_points import HookPoint
from steerlab.steering import registry
from steerlab.steering.edit import Edit
from steerlab.steering.operators import operator_from_json
from steerlab.steering.packing import pack, unpack
from steerlab.steering.projection import Ablate

V = sl.SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
W = sl.SteeringVector.from_tensor(torch.tensor([1.0, 0.0]), layer=1)


@dataclass(frozen=True)
class Turned(Ablate):
    """Ablation that tells of a further vector and a share."""

    share: float = 1.0
    other: sl.SteeringVector | None = None

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "turned", "share": self.share, "other": None if self.other is None else pack(self.other.values)}


def read(data: dict[str, Any], hook_point: HookPoint) -> Turned:
    other = None if data["other"] is None else sl.SteeringVector(unpack(data["other"]), hook_point)
    return Turned(share=data["share"], other=other)


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_READERS", {})


def plan(**options: Any) -> sl.Plan:
    return sl.Plan(sl.add(W, coef=1.0), Edit(Turned(**options), V, sl.where.default()))


def test_a_registered_operator_is_read_back():
    sl.register_operator("turned", read)
    wanted = plan(share=0.5, other=W)
    again = sl.Plan.from_json(wanted.to_json())
    assert again == wanted
    assert isinstance(again.edits[1].operator, Turned)
    assert again.edits[1].operator.other is not None
    assert again.edits[1].operator.other.layer == 1, "further vectors stand at the edit's hook point"


def test_an_unregistered_operator_is_one_error_that_says_what_to_do():
    with pytest.raises(
        UnknownOperatorError, match=r"Unknown operator 'turned'; known.*sl\.register_operator\('turned'"
    ):
        sl.Plan.from_json(plan().to_json())


def test_what_was_registered_last_counts():
    sl.register_operator("turned", lambda data, hook_point: Ablate())
    sl.register_operator("turned", read)
    assert sl.Plan.from_json(plan().to_json()) == plan()


@pytest.mark.usefixtures("unchecked_types")
def test_reading_must_give_back_what_was_written():
    sl.register_operator("turned", lambda data, hook_point: Turned(share=2.0))
    with pytest.raises(PlanError, match="must give back what was written"):
        sl.Plan.from_json(plan(share=0.5).to_json())
    sl.register_operator("turned", lambda data, hook_point: "turned")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="gave str, which is no Operator"):
        sl.Plan.from_json(plan().to_json())
    sl.register_operator("turned", lambda data, hook_point: Turned(share=data["angle"]))
    with pytest.raises(PlanError, match="Not a description of an operator"):
        sl.Plan.from_json(plan().to_json())


@pytest.mark.usefixtures("unchecked_types")
def test_what_cannot_be_registered_is_refused():
    with pytest.raises(PlanError, match="'add' is an operator of this package"):
        sl.register_operator("add", read)
    with pytest.raises(PlanError, match="kind is the text"):
        sl.register_operator("", read)
    with pytest.raises(PlanError, match="takes a function"):
        sl.register_operator("turned", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="Not a description"):
        operator_from_json({"kind": ["a"]} | {"toward": None})
    with pytest.raises(PlanError, match="Not a description"):
        operator_from_json({"kind": "rotate", "toward": None, "angle": 1.0})
