"""The operator that removes the stream's projection on a direction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint
from steerlab.steering.operators._base import Direction, Operator, Unit
from steerlab.steering.operators._edit import Edit, Norm, edit_along
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Ablate(Operator):
    """Removes the component along the direction: Δ = −(u·h) u.

    Source:
        Arditi et al. 2024, Refusal is mediated by a single direction (arXiv:2406.11717), section 2.4.
    """

    unit: Unit = "coef"

    @override
    def terms(self, along: Direction) -> tuple[Term, ...]:
        return (Term(along.unit, Gate(slope=-1.0), along.unit),)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "ablate"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], hook_point: HookPoint) -> "Ablate":
        """The operator that `to_json` described."""
        return cls()

    def __str__(self) -> str:
        return "ablate()"


@explains_arguments
def ablate(
    vector: SteeringVector,
    *,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: When | None = None,
) -> Edit:
    """Removes the stream's component along a direction, at the vector's hook point.

    Args:
        vector: the direction; its length does not matter.
        where: positions; by default the last prompt token and everything generated.
        norm: `keep` rescales the result to the norm the stream had.
        schedule: a factor over generated positions.
        when: a condition per row.
    """
    return edit_along(Ablate(), vector, where, norm, schedule, when)
