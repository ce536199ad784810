"""The operator that sets or scales the activation of a sparse autoencoder's feature."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Integer, Number, check_flag
from steerlab.core.errors import PlanError, VectorShapeError
from steerlab.steering._strengths import finite
from steerlab.steering.operators._base import Direction, Operator, Unit
from steerlab.steering.operators._edit import Edit, Norm, edit_along
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.packing import pack, unpack
from steerlab.steering.positions.condition import When
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.sae import SparseAutoencoder
from steerlab.steering.vectors import SteeringVector


@dataclass(frozen=True)
class Feature(Operator):
    """Sets or scales a feature's activation: Δ = (c − f) d, or Δ = (k − 1) f d.

    f is y where y > θ, else 0, with y = r·h + b, and d is the edit's vector, the feature's decoder row. What the
    autoencoder does not explain of the stream, and all other features, stay as they are.

    Attributes:
        reading: r.
        bias: b.
        threshold: θ.
        set_to: c; None to scale.
        scale_by: k; None to set.
        only_if_active: whether a feature that is not active is left at 0; one that is scaled is in any case.
    """

    reading: SteeringVector
    bias: float
    threshold: float
    set_to: float | None = None
    scale_by: float | None = None
    only_if_active: bool = False
    unit: Unit = "coef"

    def __post_init__(self) -> None:
        if (self.set_to is None) == (self.scale_by is None):
            raise PlanError(
                f"A feature is either set (set_to=) or scaled (scale_by=); got set_to={self.set_to!r} and "
                f"scale_by={self.scale_by!r}."
            )
        amount = "set_to" if self.scale_by is None else "scale_by"
        for name in ("bias", "threshold", amount):
            object.__setattr__(self, name, finite(getattr(self, name), f"{name} of a feature"))

    @property
    @override
    def others(self) -> Mapping[str, SteeringVector]:
        return {"reading": self.reading}

    @override
    def check(self, vector: SteeringVector) -> None:
        if self.reading.d_model != vector.d_model:
            raise VectorShapeError(
                f"The feature reads a stream of width {self.reading.d_model} and writes one of {vector.d_model}."
            )

    @override
    def terms(self, along: Direction) -> tuple[Term, ...]:
        write, read = along.values, along.others["reading"]

        def active(gate: Gate) -> Term:
            return Term(write, gate, read, self.bias)

        if self.scale_by is not None:
            return (active(Gate(slope=self.scale_by - 1.0, threshold=self.threshold)),)
        amount = self.set_to or 0.0
        if self.only_if_active:
            return (active(Gate(amount, slope=-1.0, threshold=self.threshold)),)
        return (Term(write, Gate(amount)), active(Gate(slope=-1.0, threshold=self.threshold)))

    @override
    def to_json(self) -> dict[str, Any]:
        numbers = {"bias": self.bias, "threshold": self.threshold, "set_to": self.set_to, "scale_by": self.scale_by}
        reading = {"reading": pack(self.reading.values)}
        return {"kind": "sae_feature", **reading, **numbers, "only_if_active": self.only_if_active}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], hook_point: HookPoint) -> "Feature":
        """The operator that `to_json` described; what it reads is placed at the hook point."""
        reading = SteeringVector(unpack(data["reading"]), hook_point)
        names = ("bias", "threshold", "set_to", "scale_by", "only_if_active")
        return cls(reading, *(data[name] for name in names))

    def __str__(self) -> str:
        if self.scale_by is not None:
            return f"feature(scale_by={self.scale_by:g})"
        return f"feature(set_to={self.set_to:g}{', only_if_active' if self.only_if_active else ''})"


@explains_arguments
def feature(
    sae: SparseAutoencoder,
    index: Integer,
    *,
    set_to: Number | None = None,
    scale_by: Number | None = None,
    only_if_active: bool = False,
    where: WhereLike = None,
    norm: Norm | None = None,
    schedule: Schedule | None = None,
    when: When | None = None,
) -> Edit:
    """Sets or scales the activation of a sparse autoencoder's feature, at the autoencoder's hook point.

    With f the feature's activation and d its decoder row, the stream becomes h + (set_to − f) d, or h + (scale_by − 1)
    f d: what the reconstruction would change by, added to the stream itself, so that what the autoencoder does not
    explain stays. The activation is read before the edit; where encoder and decoder rows are not dual, reading it
    afterwards gives another number.

    Args:
        sae: what `sl.import_sae(path)` gives.
        index: the feature, from 0.
        set_to: the activation wanted, in the autoencoder's own units; 0 switches the feature off.
        scale_by: the factor on its activation. Give exactly one of set_to and scale_by.
        only_if_active: set only where the feature is active already.
        where: positions; by default the last prompt token and everything generated.
        norm: `keep` rescales the result to the norm the stream had.
        schedule: a factor over generated positions.
        when: a condition per row.

    Raises:
        PlanError: if not exactly one of set_to and scale_by is given, or the autoencoder's activations are not
            functions of one reading (TopK), or cannot be computed here; says why.
        VectorFileError: for a feature that is not there.

    Examples:
        >>> sae = sl.import_sae("params.npz", hook_point="blocks.20.hook_resid_post")  # doctest: +SKIP
        >>> plan = sl.Plan(feature(sae, 1234, set_to=8.0, only_if_active=True))  # doctest: +SKIP

    Source:
        Templeton et al. 2024, Scaling Monosemanticity, on clamping features with the error term kept.
    """
    if not isinstance(sae, SparseAutoencoder):
        raise PlanError(f"feature takes what sl.import_sae(path) gives, got {type(sae).__name__}.")
    only_if_active = check_flag(only_if_active, "only_if_active")
    (written,), read = sae.vectors([index]), sae.readings([index])
    reading = SteeringVector(read.read[0], sae.hook_point)
    bias, threshold = float(read.bias[0]), float(read.threshold[0])
    amounts = _amount(set_to, "set_to"), _amount(scale_by, "scale_by")
    operator = Feature(reading, bias, threshold, *amounts, only_if_active)
    return edit_along(operator, written, where, norm, schedule, when)


def _amount(value: Number | None, name: str) -> float | None:
    return None if value is None else finite(value, f"{name} of a feature")
