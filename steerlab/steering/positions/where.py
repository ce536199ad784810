"""Where an edit acts: sets of absolute token positions, combined with `|`, `&` and `~`.

Positions count a row's own tokens from 0; padding has none and never matches. A row's prompt length divides them:
positions below it are the prompt, positions from it on are generated (in scoring, the target's tokens). `ids`,
`between` and `after` look at the tokens themselves, see `_by_tokens`; `span` and `mask` look at the prompt a row came
from, see `_prompt_lookup`.

Examples:
    >>> str(last_prompt() | generated())
    'last_prompt() | generated()'
"""

from difflib import get_close_matches
from functools import reduce
from inspect import signature
from typing import Any, Final, Literal, TypeAlias

import torch

from steerlab.core._numbers import Integer, as_list, plain
from steerlab.core.errors import PlanError
from steerlab.steering.positions._by_tokens import After, Between, Ids
from steerlab.steering.positions._markers import as_marker
from steerlab.steering.positions._rows import RowPositions as RowPositions
from steerlab.steering.positions._sets import (
    All,
    Both,
    Either,
    Generated,
    Index,
    LastPrompt,
    Mask,
    Not,
    Prompt,
    Span,
)
from steerlab.steering.positions._sets import Where as Where

_MEANT = {"token_id": "ids", "token_ids": "ids", "tokens": "ids", "last": "last_prompt", "position": "index"}


def __getattr__(name: str) -> Any:
    """Says which positions a name may have meant."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    known = ["all", "prompt", "last_prompt", "generated", "index", "ids", "between", "after", "span", "mask", "default"]
    near = [_MEANT[name]] if name in _MEANT else get_close_matches(name, known, n=1)
    hint = f"did you mean where.{near[0]}(…)?" if near else f"there are {', '.join(known)}."
    raise AttributeError(f"where has no {name!r}; {hint}")


def all() -> Where:
    """Every position."""
    return All()


def prompt() -> Where:
    """Every position of the prompt."""
    return Prompt()


def last_prompt() -> Where:
    """The prompt's last position, which predicts the first generated token."""
    return LastPrompt()


def generated(after: Integer = 0, until: Integer | None = None) -> Where:
    """Generated positions j with after ≤ j < until; j counts from 0 at the first token fed back to the model.

    Editing these alone leaves the first generated token as it was: that one is predicted by the last prompt position.
    """
    return Generated(plain(after), plain(until))


def index(*indices: Any) -> Where:
    """Single absolute positions, one by one or as one list or array; negative ones count from the prompt's end."""
    return Index(_spread(indices))


def ids(*token_ids: Any) -> Where:
    """Positions that hold one of these token ids, in the prompt or generated."""
    return Ids(_spread(token_ids))


def between(start: Any, end: Any, *, inclusive: bool = False) -> Where:
    """Positions between two events, such as the tags around a model's thoughts; a span that is still open counts.

    An event is a token id; a text, which stands for the one or several tokens that the model's tokenizer makes of it
    alone; a list of ids that follow each other; or a set (or a list of more than ids) of such, any of which will do.
    It happens at its last token, in the prompt or generated. A token is judged by itself and what came before it: the
    first tokens of an end of several tokens are still inside, and a start that comes again opens nothing new.

    Args:
        start: the event that opens a span.
        end: the event that closes it.
        inclusive: whether the last token of the start and that of the end belong to the span.

    Raises:
        PlanError: if one token can be start and end at once.

    Examples:
        >>> print(between("<think>", "</think>") & generated())
        between('<think>', '</think>') & generated()
    """
    return Between(as_marker(start, "between(start=…)"), as_marker(end, "between(end=…)"), inclusive)


def after(event: Any, n: Integer | None = None, *, inclusive: bool = False) -> Where:
    """The n positions after an event, counted from the last time that it happened.

    Args:
        event: as in `between`.
        n: how many; None for all that follow.
        inclusive: whether the event's last token belongs to them, as one more; with n=0 it is the only one.

    Examples:
        >>> print(after({13, 30}, 5))
        after({13, 30}, n=5)
    """
    return After(as_marker(event, "after(event=…)"), plain(n), inclusive)


def span(text: str, *, occurrence: Integer | None = None, missing: Literal["error", "skip"] = "error") -> Where:
    """The prompt's tokens that spell a text, found through the tokenizer's character offsets.

    A token belongs to the span if it shares a character with it, so a token that spells more than the text is in.
    For chat prompts the text is looked for in the rendered conversation, for prompts of token ids in what they spell.

    Args:
        text: what to look for, case-sensitive; in the prompt only, not in what is generated.
        occurrence: which one, from 0; negative from the end; None for all of them.
        missing: what a prompt without the text means: an error, or no position there.
    """
    return Span(text, plain(occurrence), missing)


def mask(values: Any) -> Where:
    """Positions chosen one by one.

    Args:
        values: booleans of shape [batch, pos], a row per prompt of the call; or [pos], the same for every prompt.
            Column t is absolute position t of the row, padding not counted; positions beyond the last column are out.

    Raises:
        PlanError: for another shape or dtype, or if nothing is chosen at all.
    """
    try:
        table = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PlanError(f"mask(...) takes a table of booleans, [batch, pos] or [pos]: {error}.") from error
    if table.dtype != torch.bool or table.ndim not in (1, 2):
        raise PlanError(
            f"mask(...) takes booleans of shape [batch, pos] or [pos], got {table.dtype} of shape {list(table.shape)}."
        )
    rows = torch.atleast_2d(table).cpu()
    if not bool(rows.any()):
        raise PlanError("mask(...) chooses no position; leave the edit out instead.")
    return Mask(tuple(tuple(row.nonzero()[:, 0].tolist()) for row in rows))


def default() -> Where:
    """`last_prompt() | generated()`: reaches every generated token, the first included."""
    return Either(LastPrompt(), Generated())


WhereLike: TypeAlias = Where | str | None
NAMED: Final = {"all": all, "prompt": prompt, "last_prompt": last_prompt, "generated": generated, "default": default}
"""Sets that a plain string names wherever positions are taken."""


def as_where(given: WhereLike, otherwise: Where, *, argument: str = "where") -> Where:
    """The positions that an argument states: a set itself, or the name of a simple one.

    Args:
        given: what was passed.
        otherwise: what None means.
        argument: its name, for the error.

    Raises:
        PlanError: for anything else.

    Examples:
        >>> str(as_where("generated", all()))
        'generated()'
    """
    if given is None:
        return otherwise
    if isinstance(given, str) and given in NAMED:
        return NAMED[given]()
    if not isinstance(given, Where):
        names = ", ".join(map(repr, NAMED))
        raise PlanError(f"{argument} takes positions such as sl.where.last_prompt(), or {names}; got {given!r}.")
    return given


def from_json(data: dict[str, Any]) -> Where:
    """The set that `to_json` described.

    Raises:
        PlanError: if the description is not one of ours.
    """
    try:
        return _build(data)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(f"Not a description of positions: {data!r:.120}; {_due(data)}.") from error


def _spread(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values given one by one, or as one list or array."""
    (only,) = values if len(values) == 1 else (None,)
    return tuple(as_list(only) or map(plain, values))


def _build(data: dict[str, Any]) -> Where:
    values = {**data}
    kind = values.pop("kind")
    if kind in _COMBINED:
        return _combination(kind, **values)
    return _SIMPLE[kind](**{name: _tupled(value) for name, value in values.items()})


def _combination(kind: str, of: Any) -> Where:
    """Of two sets or more; of one with `not`."""
    if not isinstance(of, list) or len(of) < (1 if kind == "not" else 2):
        raise TypeError(f"of {of!r:.60}")
    parts = [from_json(part) for part in of]
    return Not(*parts) if kind == "not" else reduce(_COMBINED[kind], parts)


def _due(data: Any) -> str:
    """What a description holds, for one that is none."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind in _COMBINED:
        return f"{kind} has 'of', a list of {'one description' if kind == 'not' else 'two or more descriptions'}"
    if isinstance(kind, str) and kind in _SIMPLE:
        keys = list(signature(_SIMPLE[kind]).parameters)
        return f"the keys of {kind} are {', '.join(['kind', *keys])}" if keys else f"{kind} has no other key"
    return f"it is a mapping with 'kind', one of {', '.join([*_SIMPLE, *_COMBINED])}"


def _tupled(value: Any) -> Any:
    """Lists as tuples, as the sets hold them."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


_SIMPLE: Final[dict[str, Any]] = {
    found.kind: found for found in (All, Prompt, LastPrompt, Generated, Index, Ids, Span, Mask)
} | {Between.kind: between, After.kind: after}
_COMBINED: Final[dict[str, Any]] = {found.kind: found for found in (Either, Both, Not)}
