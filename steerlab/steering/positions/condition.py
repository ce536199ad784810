"""Conditions: a probe read on each row decides whether an edit acts there.

Source:
    Lee et al. 2024, Programming Refusal with Conditional Activation Steering (arXiv:2409.05907), section 3: a condition
    vector is compared with the stream, and the behaviour vector is added where the comparison passes a threshold.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Number, plain
from steerlab.core.errors import PlanError
from steerlab.steering._strengths import finite
from steerlab.steering.packing import pack, unpack
from steerlab.steering.positions import where as positions
from steerlab.steering.positions._by_tokens import spell
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Where
from steerlab.steering.positions.where import WhereLike, as_where
from steerlab.steering.vectors import SteeringVector, VectorCard

Reading: TypeAlias = Literal["projection", "cosine"]


class When(ABC):
    """One answer per row: a condition, or several joined by `&` and `|`. Build it with `sl.when`."""

    @property
    @abstractmethod
    def leaves(self) -> "tuple[Condition, ...]":
        """The conditions it is joined from, each once."""

    @abstractmethod
    def joined(self, answers: "Mapping[Condition, Any]") -> Any:
        """The answer, from those of its conditions: booleans, or tensors of them."""

    @abstractmethod
    def spelled(self, tokenizer: Any) -> "When":
        """The same with the texts that its positions name as token ids."""

    @abstractmethod
    def content(self) -> list[Any]:
        """What identifies it."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`."""

    def __and__(self, other: "When") -> "When":
        return Joined("and", self, _check_when(other))

    def __or__(self, other: "When") -> "When":
        return Joined("or", self, _check_when(other))

    def __bool__(self) -> bool:
        # Python's own `and` and `or` would quietly drop one of the conditions.
        raise PlanError(f"[{self}] is answered row by row; join conditions with & and |, not with and, or.")


@dataclass(frozen=True)
class Joined(When):
    """Two conditions of which both must pass, or one.

    Attributes:
        by: `and` or `or`.
        left: one.
        right: the other.
    """

    by: Literal["and", "or"]
    left: When
    right: When

    @property
    @override
    def leaves(self) -> "tuple[Condition, ...]":
        return tuple(dict.fromkeys((*self.left.leaves, *self.right.leaves)))

    @override
    def joined(self, answers: "Mapping[Condition, Any]") -> Any:
        left, right = self.left.joined(answers), self.right.joined(answers)
        return left & right if self.by == "and" else left | right

    @override
    def spelled(self, tokenizer: Any) -> "When":
        return Joined(self.by, self.left.spelled(tokenizer), self.right.spelled(tokenizer))

    @override
    def content(self) -> list[Any]:
        return [self.by, self.left.content(), self.right.content()]

    @override
    def to_json(self) -> dict[str, Any]:
        return {"by": self.by, "of": [self.left.to_json(), self.right.to_json()]}

    def __str__(self) -> str:
        return f"({self.left}) {self.by} ({self.right})"


@dataclass(frozen=True)
class Condition(When):
    """Whether the stream, read with a probe at some prompt positions, passes a threshold; one answer per row.

    The reading is the mean over the positions of u·h (`projection`) or u·h/‖h‖ (`cosine`), with u the probe's unit
    direction, taken at the probe's hook point before this plan's edits there.

    Attributes:
        probe: the direction, at its hook point.
        above: passes if the reading exceeds this; None for no lower limit.
        below: passes if the reading is less than this; None for no upper limit.
        reading: `projection` or `cosine`.
        read: prompt positions to read; the last by default.
    """

    probe: SteeringVector
    above: float | None = None
    below: float | None = None
    reading: Reading = "projection"
    read: Where = field(default_factory=positions.last_prompt)

    def __post_init__(self) -> None:
        if not isinstance(self.probe, SteeringVector):
            raise PlanError(f"A condition's probe is a SteeringVector, got {type(self.probe).__name__}.")
        if not isinstance(self.read, Where):
            raise PlanError(f"read takes positions such as sl.where.last_prompt(), got {self.read!r}.")
        if self.reading not in ("projection", "cosine"):
            raise PlanError(f"reading is 'projection' or 'cosine', got {self.reading!r}.")
        limits = [name for name in ("above", "below") if getattr(self, name) is not None]
        if not limits:
            raise PlanError("A condition needs a threshold: above=, below= or both.")
        for name in limits:
            object.__setattr__(self, name, finite(getattr(self, name), name))
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise PlanError(f"No reading is above {self.above!r} and below {self.below!r}.")
        if self.reading == "cosine" and (
            (self.above is not None and self.above >= 1) or (self.below is not None and self.below <= -1)
        ):
            raise PlanError(
                f"No cosine passes above={self.above!r}, below={self.below!r}: cosines lie between -1 and 1; "
                "'projection' has the stream's units."
            )
        self.probe.unit  # noqa: B018  a zero probe is refused here

    @property
    def hook_point(self) -> HookPoint:
        """Where the probe is read."""
        return self.probe.hook_point

    @property
    @override
    def leaves(self) -> "tuple[Condition, ...]":
        return (self,)

    @override
    def joined(self, answers: "Mapping[Condition, Any]") -> Any:
        return answers[self]

    def measure(
        self, h: Float[Tensor, "batch pos d_model"], unit: Float[Tensor, " d_model"]
    ) -> Float[Tensor, "batch pos"]:
        """The reading at each position, float32."""
        wide = h.detach().to(torch.float32)
        projection = wide @ unit
        if self.reading == "projection":
            return projection
        return projection / torch.linalg.vector_norm(wide, dim=-1).clamp_min(torch.finfo(torch.float32).tiny)

    def passes(self, reading: Float[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Which readings pass; NaN never does."""
        passed = ~reading.isnan()
        if self.above is not None:
            passed = passed & (reading > self.above)
        return passed if self.below is None else passed & (reading < self.below)

    @override
    def spelled(self, tokenizer: Any) -> "When":
        return replace(self, read=spell(self.read, tokenizer))

    @override
    def content(self) -> list[Any]:
        return [self.probe.hash, self.above, self.below, self.reading, self.read.to_json()]

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "probe": pack(self.probe.values),
            "hook_point": self.hook_point.name,
            "card": self.probe.card.to_json(),
            "above": self.above,
            "below": self.below,
            "reading": self.reading,
            "read": self.read.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Condition":
        """The condition that `to_json` described.

        Raises:
            PlanError: if the description is not one of ours.
        """
        point, card = HookPoint.parse(data["hook_point"]), VectorCard.from_json(data["card"])
        probe = SteeringVector(unpack(data["probe"]), point, card)
        read = positions.from_json(data["read"])
        return cls(probe, data["above"], data["below"], data["reading"], read)

    def __str__(self) -> str:
        limits = [f"{sign} {limit:g}" for sign, limit in ((">", self.above), ("<", self.below)) if limit is not None]
        of = f" of {self.probe.name!r}" if self.probe.name else ""
        return f"{self.reading}{of} at {self.hook_point.name}, {self.read}, {' and '.join(limits)}"


def from_json(data: dict[str, Any]) -> When:
    """The condition, or the joined ones, that `to_json` described.

    Raises:
        PlanError: if the description is not one of ours.
    """
    if "by" not in data:
        return Condition.from_json(data)
    left, right = map(from_json, data["of"])
    if data["by"] not in ("and", "or"):
        raise PlanError(f"Conditions are joined by 'and' or 'or', got {data['by']!r:.60}.")
    return Joined(data["by"], left, right)


def _check_when(other: object) -> When:
    if not isinstance(other, When):
        raise PlanError(f"Only conditions join with conditions; got {other!r:.60}. Write e.g. sl.when(probe, above=1).")
    return other


def when(
    probe: SteeringVector,
    *,
    above: Number | None = None,
    below: Number | None = None,
    reading: Reading = "projection",
    read: WhereLike = None,
) -> Condition:
    """A condition for `when=` of an edit: it acts only in rows whose reading passes.

    The answer must be known when the edit is reached: read positions at or before the edited ones, at the edit's own
    layer or an earlier one. A probe on a later layer can steer generated tokens only, from a reading of the prompt.
    An edit reached before its answer is an error of the call, never a guess. Conditions join with `&` and `|`.

    Args:
        probe: the direction to read with, at its hook point.
        above: passes if the reading exceeds this.
        below: passes if the reading is less than this.
        reading: `projection` on the probe's unit direction, or `cosine` with it.
        read: prompt positions, averaged; the last one by default.

    Raises:
        PlanError: without a threshold, or with limits nothing can pass.
    """
    return Condition(
        probe, plain(above), plain(below), reading, as_where(read, positions.last_prompt(), argument="read")
    )


class Gate:
    """One condition, evaluated on a batch of rows.

    Args:
        condition: the condition.
        n_rows: rows of the batch.
    """

    def __init__(self, condition: Condition, n_rows: int) -> None:
        self.condition = condition
        self._n_rows = n_rows
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self._seen: Tensor | None = None
        self._unit: dict[torch.device, Tensor] = {}

    def read(self, h: Float[Tensor, "batch pos d_model"], rows: RowPositions, kept: Tensor | None) -> None:
        """Takes a pass's readings; positions it has seen before are left out, so a rerun changes nothing.

        Args:
            h: the stream at the probe's hook point.
            rows: which tokens the pass holds, on the stream's device.
            kept: which rows of the batch the pass holds; None for all.
        """
        if self._sum is not None and self._count is not None and self._seen is not None:
            self._sum, self._count, self._seen = (x.to(h.device) for x in (self._sum, self._count, self._seen))
        total, count, seen = self._state(h.device)
        place = slice(None) if kept is None else kept.to(h.device)
        fresh = self.condition.read.resolve(rows) & (rows.generated_index < 0) & (rows.positions > seen[place][:, None])
        values = self.condition.measure(h, self._unit_on(h.device)).masked_fill(~fresh, 0.0)
        total[place] += values.sum(dim=1)
        count[place] += fresh.sum(dim=1)
        seen[place] = torch.maximum(seen[place], rows.positions.amax(dim=1))

    def answers(self, rows: RowPositions, kept: Tensor | None) -> tuple[Bool[Tensor, " batch"], Bool[Tensor, " batch"]]:
        """Per row of a pass: whether its whole prompt has been read, and whether the reading passes."""
        device = rows.positions.device
        total, count, seen = self._state(device)  # where the probe is read; the edit may be on another device
        place = slice(None) if kept is None else kept.to(total.device)
        answered = seen[place] >= rows.prompt_lens.to(total.device) - 1
        return answered.to(device), self.condition.passes(total[place] / count[place]).to(device)

    def fired(self) -> list[bool]:
        """Whether the condition passed, per row of the batch.

        Raises:
            PlanError: if the condition's positions select nothing in a row's prompt.
        """
        if self._sum is None or self._count is None:
            return [False] * self._n_rows
        if bool((self._count == 0).any()):
            raise PlanError(
                f"The condition reads {self.condition.read}, which selects no token in the prompt of row "
                f"{int((self._count == 0).nonzero()[0])}; read positions that every prompt has."
            )
        return self.condition.passes(self._sum / self._count).tolist()

    def continued(self, rows_of: Tensor) -> "Gate":
        """A gate for other rows that continue these."""
        later = Gate(self.condition, len(rows_of))
        if self._sum is not None and self._count is not None and self._seen is not None:
            index = rows_of.to(self._sum.device)
            later._sum, later._count, later._seen = self._sum[index], self._count[index], self._seen[index]
        return later

    def _state(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self._sum is None or self._count is None or self._seen is None:
            self._sum = torch.zeros(self._n_rows, device=device)
            self._count = torch.zeros(self._n_rows, dtype=torch.long, device=device)
            self._seen = torch.full((self._n_rows,), -1, device=device)
        return self._sum, self._count, self._seen

    def _unit_on(self, device: torch.device) -> Tensor:
        if device not in self._unit:
            self._unit[device] = self.condition.probe.unit.to(device)
        return self._unit[device]
