"""Operators of a user's own, read back from JSON once they are registered."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from typing_extensions import override

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError, UnknownOperatorError
from steerlab.steering.operators import Ablate, operator_from_json, registry
from steerlab.steering.operators._base import Direction, Operator
from steerlab.steering.operators._edit import Edit
from steerlab.steering.operators.registry import is_shipped
from steerlab.steering.packing import pack, unpack

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


class Halved(Operator):
    """Shortens the stream; `description` and `change` are what a user may get wrong."""

    unit = "coef"

    def __init__(self, description: Any = None, change: Any = None) -> None:
        self.description = {"kind": "halved"} if description is None else description
        self.change = change

    @override
    def delta(self, h: torch.Tensor, along: Direction) -> torch.Tensor:
        return -0.5 * h if self.change is None else self.change(h)

    @override
    def constant(self, along: Direction) -> Any:
        return None if self.change is None else self.change(along.values)

    @override
    def to_json(self) -> dict[str, Any]:
        return self.description


def edit(operator: Any) -> Edit:
    return Edit(operator, V, sl.where.default())


def test_an_operator_without_a_description_cannot_be_made():
    class Nameless(Operator):
        unit = "coef"

        @override
        def delta(self, h: torch.Tensor, along: Direction) -> torch.Tensor:
            return h

    with pytest.raises(TypeError, match=r"abstract class Nameless .*to_json"):
        Nameless()  # pyright: ignore[reportAbstractUsage]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("description", "message"),
    [
        ([], r"to_json of the operator Halved gives a dict .*'kind': 'halved'.*; got \[\]"),
        ({"name": "halved"}, "a dict with a non-empty text 'kind'"),
        ({"kind": ""}, "a dict with a non-empty text 'kind'"),
        ({"kind": 3}, "a dict with a non-empty text 'kind'"),
        ({"kind": "ablate"}, "gives the kind 'ablate', which is an operator of this package"),
        ({"kind": "halved", "along": torch.zeros(2)}, "to_json of the operator Halved gives what is no JSON"),
    ],
)
def test_a_description_that_cannot_identify_is_refused_when_the_edit_is_made(description: Any, message: str):
    with pytest.raises(PlanError, match=message):
        edit(Halved(description))


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_no_operator_is_refused_when_the_edit_is_made():
    with pytest.raises(PlanError, match=r"got the class Halved itself; make one of it: Halved\(…\)\."):
        edit(Halved)
    with pytest.raises(PlanError, match="An edit takes an operator such as"):
        edit("ablate")
    unitless = Halved()
    unitless.unit = "metre"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(PlanError, match=r"The operator Halved needs a unit.*'metre'"):
        edit(unitless)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda h: 1.0, "got 1.0"),
        (lambda h: "h", "got 'h'"),
        (lambda h: torch.zeros(3), r"got \[3\]"),
        (lambda h: torch.zeros(7, *h.shape), r"got \[7, "),
    ],
)
def test_a_change_of_the_wrong_kind_or_shape_is_one_error(change: Any, got: str):
    with pytest.raises(PlanError, match=rf"^delta of the operator Halved gives a tensor of shape \[5, 2\].*{got}"):
        edit(Halved(change=change)).delta(torch.ones(5, 2))
    with pytest.raises(PlanError, match=rf"^constant of the operator Halved gives a tensor of shape \[2\].*{got}"):
        edit(Halved(change=change)).constant_delta(torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("unchecked_types")
def test_a_forgotten_return_is_one_error():
    class Forgotten(Halved):
        @override
        def delta(self, h: torch.Tensor, along: Direction) -> Any:
            h * 2  # pyright: ignore[reportUnusedExpression]

    with pytest.raises(PlanError, match=r"delta of the operator Forgotten gives a tensor .*, got None"):
        edit(Forgotten()).delta(torch.ones(5, 2))


@pytest.mark.usefixtures("unchecked_types")
def test_a_change_may_broadcast():
    for smaller in (torch.ones(2), torch.ones(1), torch.ones(5, 1), torch.tensor(1.0)):
        change = edit(Halved(change=lambda h, smaller=smaller: smaller)).delta(torch.ones(5, 2))
        assert (torch.ones(5, 2) + change).tolist() == [[2.0, 2.0]] * 5


def test_a_class_derived_from_a_shipped_operator_is_not_shipped():
    assert is_shipped(Ablate())
    assert not is_shipped(Turned())
