"""Sets of positions that depend on the tokens of a row: by id, between two events, and after one."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from steerlab.core._numbers import check_integer, shown
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import PlanError
from steerlab.steering.positions._markers import (
    Marker,
    are_known,
    as_marker,
    can_coincide,
    sequences_of,
    spelled,
    told,
)
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Not, Pair, Where, integers
from steerlab.steering.positions._token_rules import TokenRule, Trail


class ByTokens(Where):
    """A set that is decided token by token, from a token and those before it, in the prompt and generated."""

    @property
    @abstractmethod
    def rule(self) -> TokenRule:
        """What decides.

        Raises:
            PlanError: if a text in it has not been spelled in tokens.
        """

    @abstractmethod
    def spelled(self, tokenizer: Any) -> "ByTokens":
        """The same with texts as token ids."""

    @property
    @abstractmethod
    def token_ids_named(self) -> tuple[int, ...]:
        """Every token id that it names."""


@dataclass(frozen=True)
class Ids(ByTokens):
    """Positions that hold one of these tokens, in the prompt or generated."""

    kind = "ids"
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        found = integers(self.token_ids)
        if not found or min(found) < 0:
            raise PlanError(f"ids(...) takes one or more token ids, integers ≥ 0, got {shown(self.token_ids)}.")
        object.__setattr__(self, "token_ids", found)

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        if self in rows.followed:
            return rows.followed[self].to(rows.positions.device)
        if rows.token_ids is None:
            raise PlanError(f"{self} needs the tokens that run, and this call does not know them.")
        tokens = rows.token_ids.to(rows.positions.device)
        return torch.isin(tokens, torch.tensor(self.token_ids, device=tokens.device))

    @property
    @override
    def rule(self) -> TokenRule:
        return TokenRule(tuple((token,) for token in self.token_ids), limit=0, inclusive=True)

    @override
    def spelled(self, tokenizer: Any) -> "Ids":
        return self

    @property
    @override
    def token_ids_named(self) -> tuple[int, ...]:
        return self.token_ids

    def __str__(self) -> str:
        return f"ids({', '.join(map(str, self.token_ids))})"


class Following(ByTokens):
    """A set that looks back at what came before a token."""

    @override
    def _select(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        if self not in rows.followed:
            _check_whole_rows(self, rows)
            rows = Trail({self: self.rule}, len(rows.positions)).follow(rows, None)
        return rows.followed[self].to(rows.positions.device)

    @property
    @abstractmethod
    def markers(self) -> dict[str, Marker]:
        """The events it names, by argument."""

    @override
    def spelled(self, tokenizer: Any) -> "Following":
        if are_known(*self.markers.values()):
            return self
        found: dict[str, Any] = {name: spelled(marker, tokenizer, name) for name, marker in self.markers.items()}
        return replace(self, **found)  # pyright: ignore[reportArgumentType]

    @property
    @override
    def token_ids_named(self) -> tuple[int, ...]:
        parts = [part for marker in self.markers.values() for part in marker]
        return tuple(token for part in parts if not isinstance(part, str) for token in part)


@dataclass(frozen=True)
class Between(Following):
    """Positions after a start event and before the end event that follows it, or the row's end.

    Attributes:
        start: what opens a span.
        end: what closes it.
        inclusive: whether the tokens that complete them belong to it.
    """

    kind = "between"
    start: Marker
    end: Marker
    inclusive: bool = False

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, as_marker(getattr(self, name), f"between({name}=…)"))
        _check_inclusive(self.inclusive)
        sequences = [[part for part in marker if not isinstance(part, str)] for marker in (self.start, self.end)]
        if set(self.start) & set(self.end) or can_coincide(*sequences):
            raise PlanError(
                f"{self}: one token can be start and end at once, so nobody can tell which it is. Name events that "
                "differ."
            )

    @property
    @override
    def markers(self) -> dict[str, Marker]:
        return {"start": self.start, "end": self.end}

    @property
    @override
    def rule(self) -> TokenRule:
        found = [sequences_of(marker, f"between({name}=…)") for name, marker in self.markers.items()]
        return TokenRule(found[0], found[1], inclusive=self.inclusive)

    def __str__(self) -> str:
        return f"between({told(self.start)}, {told(self.end)}{', inclusive=True' if self.inclusive else ''})"


@dataclass(frozen=True)
class After(Following):
    """The n positions after an event, counted from the last time it happened.

    Attributes:
        event: what happens.
        n: how many; None for all that follow.
        inclusive: whether the token that completes the event belongs to them.
    """

    kind = "after"
    event: Marker
    n: int | None = None
    inclusive: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "event", as_marker(self.event, "after(event=…)"))
        _check_inclusive(self.inclusive)
        if self.n is not None:
            least = 0 if self.inclusive else 1
            object.__setattr__(self, "n", check_integer(self.n, "after(n=…)", least=least, error=PlanError))

    @property
    @override
    def markers(self) -> dict[str, Marker]:
        return {"event": self.event}

    @property
    @override
    def rule(self) -> TokenRule:
        return TokenRule(sequences_of(self.event, "after(event=…)"), limit=self.n, inclusive=self.inclusive)

    def __str__(self) -> str:
        options = [f", n={self.n}"] * (self.n is not None) + [", inclusive=True"] * self.inclusive
        return f"after({told(self.event)}{''.join(options)})"


def spell(where: Where, tokenizer: Any) -> Where:
    """The set with the texts of its events as token ids.

    Args:
        where: a set.
        tokenizer: the model's own; None if there is none, which is an error only if there are texts.

    Raises:
        PlanError: for a text that cannot be written in this model's tokens.
    """
    if isinstance(where, ByTokens):
        return where.spelled(tokenizer)
    if isinstance(where, Pair):
        left, right = spell(where.left, tokenizer), spell(where.right, tokenizer)
        return where if left is where.left and right is where.right else replace(where, left=left, right=right)
    if isinstance(where, Not):
        inner = spell(where.inner, tokenizer)
        return where if inner is where.inner else replace(where, inner=inner)
    return where


def check_vocabulary(where: Where, d_vocab: int, model: str) -> None:
    """Checks that the tokens which a set names exist.

    Raises:
        PlanError: otherwise.
    """
    for leaf in by_tokens([where]):
        beyond = [token for token in leaf.token_ids_named if token >= d_vocab]
        if beyond:
            raise PlanError(
                f"{leaf} names token {beyond[0]}, and the vocabulary of {model} ends at {d_vocab - 1}; no row can "
                "ever hold it."
            )


def on_model(where: Where, tokenizer: Any, info: ModelInfo) -> Where:
    """The set in the tokens of a model: `spell` and `check_vocabulary`.

    Raises:
        PlanError: for events that this model's tokens cannot express.
    """
    found = spell(where, tokenizer)
    check_vocabulary(found, info.d_vocab, info.name)
    return found


def by_tokens(sets: Iterable[Where]) -> tuple[ByTokens, ...]:
    """The simple sets among some that depend on tokens, each once."""
    return tuple(dict.fromkeys(leaf for where in sets for leaf in where.leaves() if isinstance(leaf, ByTokens)))


def trail_of(sets: Iterable[Where], n_rows: int) -> Trail:
    """What follows the sets among some that look back, in a batch of rows."""
    return Trail({leaf: leaf.rule for leaf in by_tokens(sets) if isinstance(leaf, Following)}, n_rows)


def _check_whole_rows(where: Where, rows: RowPositions) -> None:
    """A pass that nobody followed can be looked at by itself only if it holds every row from its first token."""
    if rows.token_ids is None:
        raise PlanError(f"{where} needs the tokens that run, and this call does not know them.")
    first = rows.positions.masked_fill(~rows.is_token, 0)
    is_whole = ~rows.is_token.any(dim=1) | (rows.is_token & (first == 0)).any(dim=1)
    if not bool(is_whole.all()):
        raise PlanError(f"{where} looks back at tokens of earlier passes, which are not known here.")


def _check_inclusive(value: object) -> None:
    if not isinstance(value, bool):
        raise PlanError(f"inclusive is True or False, got {shown(value)}.")
