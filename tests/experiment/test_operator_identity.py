"""The identity of an operator of a user's own: what changes it, and what does not."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from steerlab.experiment._store.operator_identity import changed_parts, operator_identity
from steerlab.steering.operators._base import Operator
from tests.forked import run_forked

HEAD = """
import functools
from dataclasses import dataclass
import torch
from steerlab.steering.operators._base import Operator

class Shrink(Operator):
    unit = "coef"
    def to_json(self):
        return {"kind": "shrink"}
"""
DELTA = """
    def delta(self, h, along):
        return -0.5 * h
"""


def identity(body: str = DELTA, make: str = "Shrink()", head: str = HEAD) -> dict[str, Any]:
    """Of the operator that a module of this text makes; as it is read back from JSON."""
    module: dict[str, Any] = {"__name__": "own"}
    exec(compile(head + body, "own.py", "exec"), module)
    return json.loads(json.dumps(operator_identity(eval(make, module))))


def test_the_same_code_is_the_same_wherever_it_stands():
    again = DELTA.replace("return", '"""What is added."""\n        # by half\n\n        return')
    assert changed_parts(identity(), identity(again)) == [], "comments and docstrings change no Δ"
    assert changed_parts(identity(), identity(DELTA + "    def __str__(self): return 'shrink'")) == []


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        (DELTA, DELTA.replace("0.5", "0.25"), ["Shrink.delta"]),
        (DELTA, DELTA.replace("along)", "along, by=2)"), ["Shrink.delta"]),
        (DELTA, DELTA + "    def formula(self, along): return (0.0, 1.0, 0.0, 0.0)", ["Shrink.formula"]),
        (DELTA + "    share = 0.5", DELTA + "    share = 0.25", ["Shrink.share"]),
        (DELTA + "    has_formula = False", DELTA, ["Shrink.has_formula"]),
        (DELTA + "    def __init__(self): self.by = 1", DELTA + "    def __init__(self): self._by = 1", None),
        (
            DELTA + "    @functools.cached_property\n    def by(self): return 1",
            DELTA + "    @functools.cached_property\n    def by(self): return 2",
            ["Shrink.by"],
        ),
        (
            DELTA + "    @property\n    def by(self): return 1",
            DELTA + "    @property\n    def by(self): return 2",
            ["Shrink.by"],
        ),
        (
            DELTA.replace("    def", "    @torch.no_grad()\n    def"),
            DELTA.replace("    def", "    @torch.no_grad()\n    def").replace("0.5", "0.25"),
            ["Shrink.delta"],
        ),
        (
            DELTA.replace("    def", "    @torch.no_grad()\n    def").replace("along)", "along, by=1)"),
            DELTA.replace("    def", "    @torch.no_grad()\n    def").replace("along)", "along, by=2)"),
            ["Shrink.delta"],
        ),
    ],
)
def test_changed_code_is_told_by_name(before: str, after: str, parts: list[str] | None):
    found = changed_parts(identity(before), identity(after))
    assert found == (["Shrink.__init__", "self.by"] if parts is None else parts)


def test_the_base_class_counts():
    derived = "\nclass Own(Shrink):\n    pass\n"
    found = changed_parts(identity(DELTA + derived, "Own()"), identity(DELTA.replace("0.5", "0.25") + derived, "Own()"))
    assert found == ["Shrink.delta"]


@pytest.mark.parametrize("slots", [False, True])
def test_a_value_that_the_description_leaves_out_counts(slots: bool):
    own = f"\n@dataclass(frozen=True, slots={slots})\nclass Own(Shrink):\n    by: float = 1.0\n"
    assert changed_parts(identity(DELTA + own, "Own()"), identity(DELTA + own, "Own(2.0)")) == ["self.by"]
    other_default = own.replace("1.0", "3.0")
    assert changed_parts(identity(DELTA + own, "Own(2.0)"), identity(DELTA + other_default, "Own(2.0)")) == []


def made(by: Any) -> Operator:
    class Closed(Operator):
        unit = "coef"

        def delta(self, h: torch.Tensor, along: Any) -> torch.Tensor:
            return by(h) if callable(by) else by * h

        def to_json(self) -> dict[str, Any]:
            return {"kind": "closed"}

        @functools.cached_property
        def kept(self) -> float:
            return 1.0

    return Closed()


@pytest.mark.parametrize(("one", "other"), [(1.0, 2.0), (lambda h: h, lambda h: -h)])
def test_what_a_method_closes_over_counts(one: float | Callable, other: float | Callable):
    assert changed_parts(operator_identity(made(one)), operator_identity(made(other))) == ["Closed.delta"]
    assert changed_parts(operator_identity(made(one)), operator_identity(made(one))) == []


def test_what_is_computed_once_and_kept_does_not_count():
    operator = made(1.0)
    before = operator_identity(operator)
    assert operator.kept == 1.0  # pyright: ignore[reportAttributeAccessIssue]
    assert changed_parts(before, operator_identity(operator)) == []


def test_under_another_python_the_source_decides():
    before = operator_identity(made(1.0))
    elsewhere = {**before, "python": "cpython-399"}
    elsewhere["parts"] = {name: [source, "compiled otherwise"] for name, (source, _) in before["parts"].items()}
    assert changed_parts(elsewhere, before) == []
    elsewhere["parts"] = {name: ["written otherwise", code] for name, (_, code) in before["parts"].items()}
    assert changed_parts(elsewhere, before) == sorted(before["parts"])


def test_it_is_the_same_in_every_process():
    """Text has another hash there, and sets of texts another order."""
    body = DELTA.replace("-0.5", '(str(h) in {"a", "b", "c", "d", "e", "f", "g", "h"})')
    assert changed_parts(identity(body), run_forked(identity, body)) == []
