"""The operator that applies a low-rank edit of the LoReFT family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError, VectorShapeError
from steerlab.steering.low_rank import LowRank
from steerlab.steering.operators._base import Direction, Operator, Unit
from steerlab.steering.operators._edit import Edit, Norm, edit_along
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.packing import pack, unpack
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Loreft(Operator):
    """Sets the projections on the rows of R to W h + b: Δ = Rᵀ(W h + b − R h).

    It is the sum over i of ((W − R)_i·h + b_i) R_i, so it has as many terms as its rank, and twice as many directions.

    Attributes:
        low_rank: R, W and b.

    Source:
        Wu et al. 2024, ReFT: Representation Finetuning for Language Models (arXiv:2404.03592), equation 2.
    """

    low_rank: LowRank
    unit: Unit = "coef"

    @override
    def check(self, vector: SteeringVector) -> None:
        if self.low_rank.d_model != vector.d_model:
            raise VectorShapeError(
                f"loreft acts on a stream of width [{self.low_rank.d_model}], the vector has [{vector.d_model}]."
            )

    @override
    def terms(self, along: Direction) -> tuple[Term, ...]:
        edit, device = self.low_rank, along.unit.device
        rows = zip(edit.rotation.to(device), edit.read.to(device), edit.bias.tolist(), strict=True)
        return tuple(_term(write, read, bias) for write, read, bias in rows)

    @override
    def to_json(self) -> dict[str, Any]:
        edit = self.low_rank
        parts = {"rotation": edit.rotation, "weight": edit.weight, "bias": edit.bias}
        return {"kind": "loreft", "rank": edit.rank} | {name: pack(part.flatten()) for name, part in parts.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], hook_point: HookPoint) -> "Loreft":
        """The operator that `to_json` described."""
        rank, bias = data["rank"], unpack(data["bias"])
        rotation, weight = unpack(data["rotation"]), unpack(data["weight"])
        if rank != bias.numel() or not rank or rotation.numel() % rank or weight.numel() != rotation.numel():
            raise ValueError("R, W and b do not fit together")
        return cls(LowRank(rotation.reshape(rank, -1), weight.reshape(rank, -1), bias))

    def __str__(self) -> str:
        return f"loreft(rank {self.low_rank.rank})"


@explains_arguments
def loreft(
    vector: SteeringVector,
    *,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: When | None = None,
) -> Edit:
    """Applies the low-rank edit that came with a vector, at the vector's hook point.

    Args:
        vector: a vector with a low-rank edit, from `extract(method="loreft")` or `import_loreft(…).vector()`.
        where: positions; by default the last prompt token and everything generated.
        norm: `keep` rescales the result to the norm the stream had.
        schedule: a factor over generated positions.
        when: a condition per row.

    Raises:
        PlanError: for a vector without a low-rank edit.

    Examples:
        >>> edit = LowRank(torch.eye(1, 2), torch.zeros(1, 2), torch.tensor([2.0]))
        >>> point = HookPoint(1, "resid_post")
        >>> print(loreft(SteeringVector(torch.tensor([1.0, 0.0]), point, low_rank=edit)))
        loreft(rank 1) at blocks.1.hook_resid_post, last_prompt() | generated()
    """
    if not isinstance(vector, SteeringVector) or vector.low_rank is None:
        raise PlanError(
            f"loreft takes a vector with a low-rank edit, from sl.extract(…, method='loreft') or "
            f"sl.import_loreft(…).vector(); got {vector!r:.80}."
        )
    return edit_along(Loreft(vector.low_rank), vector, where, norm, schedule, when)


def _term(write: torch.Tensor, read: torch.Tensor, bias: float) -> Term:
    """One row; where it reads nothing it adds a constant."""
    if not bool(read.any()):
        return Term(write, Gate(bias))
    return Term(write, Gate(slope=1.0), read, bias)
