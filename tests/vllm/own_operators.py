"""An operator that is not the package's, as a user's module has it; `steerlab serve --import` imports it."""

from dataclasses import dataclass

import steerlab as sl
from steerlab.steering.operators import Gate, Operator, Term


@dataclass(frozen=True)
class Reflect(Operator):
    """Turns the component along the direction round: Δ = −2 (u·h) u."""

    unit: str = "coef"

    def terms(self, along):
        return (Term(write=along.unit, gate=Gate(slope=-2.0), read=along.unit),)

    def to_json(self):
        return {"kind": "served-reflect"}

    def __str__(self):
        return "reflect()"


@dataclass(frozen=True)
class Unregistered(Reflect):
    def to_json(self):
        return {"kind": "unregistered"}


sl.register_operator("served-reflect", lambda data, hook_point: Reflect())
