"""Where an edit acts: sets of absolute token positions, combined with `|`, `&` and `~`.

Positions count a row's own tokens from 0; padding has none and never matches. A row's prompt length divides them:
positions below it are the prompt, positions from it on are generated (in scoring, the target's tokens).

Examples:
    >>> str(last_prompt() | generated())
    'last_prompt() | generated()'
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from typing_extensions import override

from steerlab.core.errors import PlanError


@dataclass(frozen=True)
class RowPositions:
    """Which tokens one forward pass holds.

    Attributes:
        positions: absolute position of each token in its row, −1 for padding; shape [batch, pos].
        prompt_lens: prompt length of each row; shape [batch].
        lens_on: copies of `prompt_lens` by device; passes over the same rows share it.
    """

    positions: Int[Tensor, "batch pos"]
    prompt_lens: Int[Tensor, " batch"]
    lens_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _positions_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_token(self) -> Bool[Tensor, "batch pos"]:
        """False for padding."""
        return self.positions >= 0

    @property
    def generated_index(self) -> Int[Tensor, "batch pos"]:
        """0-based index among the row's generated tokens; negative in the prompt."""
        return self.positions - self.prompt_lens[:, None]

    def on(self, device: torch.device) -> "RowPositions":
        """The same on a device; each tensor is copied there at most once."""
        if device == self.positions.device:
            return self
        if device not in self.lens_on:
            self.lens_on[device] = self.prompt_lens.to(device)
        if device not in self._positions_on:
            self._positions_on[device] = self.positions.to(device)
        return RowPositions(self._positions_on[device], self.lens_on[device])

    def provide(self, device: torch.device, positions: Int[Tensor, "batch pos"]) -> None:
        """Takes a copy of the positions that crossed to a device together with something else."""
        self._positions_on[device] = positions

    @classmethod
    def of_rows(cls, lengths: list[int], prompt_lens: list[int], device: torch.device | str = "cpu") -> "RowPositions":
        """Whole rows of these lengths, left-padded to the longest."""
        width = max(lengths)
        ends = torch.tensor(lengths, device=device)[:, None]
        positions = torch.arange(width, device=device)[None, :] - width + ends
        return cls(positions.clamp_min(-1), torch.tensor(prompt_lens, device=device))


class Where:
    """A set of positions. Build it with this module's functions and combine with `|`, `&` and `~`."""

    def resolve(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        """Which of the pass's tokens belong to the set; never padding."""
        return self._select(rows) & rows.is_token

    @abstractmethod
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        """Which positions belong to the set, padding not yet excluded."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`."""

    def __or__(self, other: "Where") -> "Where":
        return Either(self, _check(other))

    def __and__(self, other: "Where") -> "Where":
        return Both(self, _check(other))

    def __invert__(self) -> "Where":
        return Not(self)


@dataclass(frozen=True)
class All(Where):
    """Every position."""

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return rows.is_token

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "all"}

    def __str__(self) -> str:
        return "all()"


@dataclass(frozen=True)
class Prompt(Where):
    """Every position of the prompt."""

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return rows.generated_index < 0

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "prompt"}

    def __str__(self) -> str:
        return "prompt()"


@dataclass(frozen=True)
class LastPrompt(Where):
    """The prompt's last position, which predicts the first generated token."""

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return rows.generated_index == -1

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "last_prompt"}

    def __str__(self) -> str:
        return "last_prompt()"


@dataclass(frozen=True)
class Generated(Where):
    """Generated positions j with after ≤ j < until, j counted from 0 at the first token fed back."""

    after: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("after", self.after), ("until", self.until)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise PlanError(f"generated({name}=…) takes an integer ≥ 0, got {value!r}.")
        if self.until is not None and self.until <= self.after:
            raise PlanError(f"generated(after={self.after}, until={self.until}) is empty; until must exceed after.")

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        inside = rows.generated_index >= self.after
        return inside if self.until is None else inside & (rows.generated_index < self.until)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "generated", "after": self.after, "until": self.until}

    def __str__(self) -> str:
        limits = [f"after={self.after}"] * (self.after > 0) + [f"until={self.until}"] * (self.until is not None)
        return f"generated({', '.join(limits)})"


@dataclass(frozen=True)
class Index(Where):
    """Single absolute positions; negative ones count from the prompt's end (−1 is its last token)."""

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.indices or any(isinstance(i, bool) or not isinstance(i, int) for i in self.indices):
            raise PlanError(f"index(...) takes one or more integers, got {self.indices!r}.")

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        hit = torch.zeros_like(rows.is_token)
        for index in self.indices:
            wanted = torch.full_like(rows.prompt_lens, index) if index >= 0 else rows.prompt_lens + index
            hit |= (rows.positions == wanted[:, None]) & (wanted >= 0)[:, None]
        return hit

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "index", "indices": list(self.indices)}

    def __str__(self) -> str:
        return f"index({', '.join(map(str, self.indices))})"


@dataclass(frozen=True)
class Either(Where):
    """Positions in one set or the other."""

    left: Where
    right: Where

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return self.left.resolve(rows) | self.right.resolve(rows)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "either", "of": [self.left.to_json(), self.right.to_json()]}

    def __str__(self) -> str:
        return f"{self.left} | {self.right}"


@dataclass(frozen=True)
class Both(Where):
    """Positions in both sets."""

    left: Where
    right: Where

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return self.left.resolve(rows) & self.right.resolve(rows)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "both", "of": [self.left.to_json(), self.right.to_json()]}

    def __str__(self) -> str:
        return f"{_bracketed(self.left)} & {_bracketed(self.right)}"


@dataclass(frozen=True)
class Not(Where):
    """Positions outside a set."""

    inner: Where

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return ~self.inner.resolve(rows)

    @override
    def to_json(self) -> dict[str, Any]:
        return {"kind": "not", "of": [self.inner.to_json()]}

    def __str__(self) -> str:
        return f"~{_bracketed(self.inner)}"


def all() -> Where:
    """Every position."""
    return All()


def prompt() -> Where:
    """Every position of the prompt."""
    return Prompt()


def last_prompt() -> Where:
    """The prompt's last position, which predicts the first generated token."""
    return LastPrompt()


def generated(after: int = 0, until: int | None = None) -> Where:
    """Generated positions j with after ≤ j < until; j counts from 0 at the first token fed back to the model.

    Editing these alone leaves the first generated token as it was: that one is predicted by the last prompt position.
    """
    return Generated(after, until)


def index(*indices: int) -> Where:
    """Single absolute positions; negative ones count from the prompt's end (−1 is its last token)."""
    return Index(tuple(indices))


def default() -> Where:
    """`last_prompt() | generated()`: reaches every generated token, the first included."""
    return Either(LastPrompt(), Generated())


def from_json(data: dict[str, Any]) -> Where:
    """The set that `to_json` described.

    Raises:
        PlanError: if the description is not one of ours.
    """
    try:
        return _build(data)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(f"Not a description of positions: {data!r:.120}.") from error


def _build(data: dict[str, Any]) -> Where:
    kind = data["kind"]
    simple = {"all": All, "prompt": Prompt, "last_prompt": LastPrompt}
    if kind in simple:
        return simple[kind]()
    if kind == "generated":
        return Generated(data["after"], data["until"])
    if kind == "index":
        return Index(tuple(data["indices"]))
    parts = [from_json(part) for part in data["of"]]
    return {"either": Either, "both": Both, "not": Not}[kind](*parts)


def _check(other: object) -> Where:
    if not isinstance(other, Where):
        raise PlanError(f"Only positions combine with positions; got {other!r}. Write e.g. sl.where.prompt().")
    return other


def _bracketed(where: Where) -> str:
    return f"({where})" if isinstance(where, Either | Both) else str(where)
