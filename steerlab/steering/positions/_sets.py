"""The sets of positions that `steerlab.steering.positions.where` builds."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from steerlab.core._characters import check_whole
from steerlab.core._numbers import as_integer, as_list, check_integer, shown
from steerlab.core.errors import PlanError
from steerlab.steering.positions._rows import RowPositions


class Where(ABC):
    """A set of positions. Build it with the functions of `sl.where` and combine with `|`, `&` and `~`."""

    kind: ClassVar[str]

    def resolve(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        """Which of the pass's tokens belong to the set; never padding."""
        return self._select(rows) & rows.is_token

    @abstractmethod
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        """Which positions belong to the set, padding not yet excluded."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable description, read back by `from_json`: the kind, and the values or the sets in it."""
        if self.parts:
            return {"kind": self.kind, "of": [part.to_json() for part in self.parts]}
        return {"kind": self.kind} | {name: _listed(value) for name, value in vars(self).items()}

    def __str__(self) -> str:
        return f"{self.kind}()"

    @property
    def parts(self) -> "tuple[Where, ...]":
        """The sets it is combined from; empty for a simple one."""
        return ()

    def leaves(self) -> "Iterator[Where]":
        """Every simple set in it."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def __or__(self, other: "Where") -> "Where":
        return Either(self, _check(other))

    def __and__(self, other: "Where") -> "Where":
        return Both(self, _check(other))

    def __invert__(self) -> "Where":
        return Not(self)

    def __bool__(self) -> bool:
        # Python's own `and`, `or` and `not` would quietly drop one of the sets.
        raise PlanError(f"{self} is neither true nor false; combine positions with |, & and ~, not with or, and, not.")


@dataclass(frozen=True)
class All(Where):
    kind = "all"

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return rows.is_token


@dataclass(frozen=True)
class Prompt(Where):
    kind = "prompt"

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return rows.generated_index < 0


@dataclass(frozen=True)
class LastPrompt(Where):
    """The prompt's last position, which predicts the first generated token."""

    kind = "last_prompt"

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return rows.generated_index == -1


@dataclass(frozen=True)
class Generated(Where):
    """Generated positions j with after ≤ j < until, j counted from 0 at the first token fed back."""

    kind = "generated"
    after: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        for name in ("after", "until"):
            value = getattr(self, name)
            if name == "after" or value is not None:
                object.__setattr__(self, name, check_integer(value, f"generated({name}=…)", least=0, error=PlanError))
        if self.until is not None and self.until <= self.after:
            raise PlanError(f"generated(after={self.after}, until={self.until}) is empty; until must exceed after.")

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        inside = rows.generated_index >= self.after
        return inside if self.until is None else inside & (rows.generated_index < self.until)

    def __str__(self) -> str:
        limits = [f"after={self.after}"] * (self.after > 0) + [f"until={self.until}"] * (self.until is not None)
        return f"generated({', '.join(limits)})"


@dataclass(frozen=True)
class Index(Where):
    """Single absolute positions; negative ones count from the prompt's end (−1 is its last token)."""

    kind = "index"
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        found = integers(self.indices)
        if not found:
            raise PlanError(f"index(...) takes one or more integers, got {shown(self.indices)}.")
        object.__setattr__(self, "indices", found)

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        hit = torch.zeros_like(rows.is_token)
        for index in self.indices:
            wanted = torch.full_like(rows.prompt_lens, index) if index >= 0 else rows.prompt_lens + index
            hit |= (rows.positions == wanted[:, None]) & (wanted >= 0)[:, None]
        return hit

    def __str__(self) -> str:
        return f"index({', '.join(map(str, self.indices))})"


class Marked(Where):
    """A set that is looked up in each row's prompt before the run; module `_prompt_lookup` does so."""

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        if rows.marks is None or self not in rows.marks.tables:
            raise PlanError(f"{self} needs the prompts of the call, and here they are not known.")
        return rows.marked(self)


@dataclass(frozen=True)
class Span(Marked):
    """Prompt tokens that spell a text: every token that shares a character with it."""

    kind = "span"
    text: str
    occurrence: int | None = None
    missing: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise PlanError(f"span(text) takes a text that is not empty, got {self.text!r}.")
        check_whole(self.text, "span(text)", PlanError)
        if self.occurrence is not None:
            occurrence = as_integer(self.occurrence)
            if occurrence is None:
                raise PlanError(
                    f"occurrence is an integer (from 0; negative from the end) or None, got {shown(self.occurrence)}."
                )
            object.__setattr__(self, "occurrence", occurrence)
        if self.missing not in ("error", "skip"):
            raise PlanError(f"missing is 'error' or 'skip', got {self.missing!r}.")

    def __str__(self) -> str:
        which = "" if self.occurrence is None else f", occurrence={self.occurrence}"
        return f"span({self.text!r}{which}{', missing=skip' if self.missing == 'skip' else ''})"


@dataclass(frozen=True)
class Mask(Marked):
    """Positions given one by one: per prompt of the call, or the same for every prompt if there is one row only.

    Attributes:
        rows: absolute positions per prompt.
    """

    kind = "mask"
    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(integers(row) for row in self.rows)
        if any(len(found) < len(row) or min(found, default=0) < 0 for found, row in zip(rows, self.rows, strict=True)):
            raise PlanError(f"A mask holds absolute positions, integers ≥ 0, got {self.rows!r:.80}.")
        object.__setattr__(self, "rows", rows)

    def __str__(self) -> str:
        return f"mask({len(self.rows)} × {sum(map(len, self.rows))} positions)"


@dataclass(frozen=True)
class Pair(Where):
    """Two sets combined."""

    left: Where
    right: Where

    @property
    @override
    def parts(self) -> tuple[Where, ...]:
        return (self.left, self.right)


@dataclass(frozen=True)
class Either(Pair):
    """Positions in one set or the other."""

    kind = "either"

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return self.left.resolve(rows) | self.right.resolve(rows)

    def __str__(self) -> str:
        return f"{self.left} | {self.right}"


@dataclass(frozen=True)
class Both(Pair):
    """Positions in both sets."""

    kind = "both"

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return self.left.resolve(rows) & self.right.resolve(rows)

    def __str__(self) -> str:
        return f"{_bracketed(self.left)} & {_bracketed(self.right)}"


@dataclass(frozen=True)
class Not(Where):
    """Positions outside a set."""

    kind = "not"
    inner: Where

    @property
    @override
    def parts(self) -> tuple[Where, ...]:
        return (self.inner,)

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        return ~self.inner.resolve(rows)

    def __str__(self) -> str:
        return f"~{_bracketed(self.inner)}"


def _check(other: object) -> Where:
    if not isinstance(other, Where):
        raise PlanError(f"Only positions combine with positions; got {other!r}. Write e.g. sl.where.prompt().")
    return other


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON reads them back."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _bracketed(where: Where) -> str:
    return f"({where})" if isinstance(where, Either | Both) else str(where)


def integers(given: Any) -> tuple[int, ...]:
    """Some integers as Python's own; empty if something else is among them."""
    found = [as_integer(value) for value in as_list(given) or []]
    return tuple(value for value in found if value is not None) if None not in found else ()
