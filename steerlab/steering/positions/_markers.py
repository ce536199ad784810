"""Events in a row of tokens, as positions name them: a token, a short sequence of tokens, or any of several."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from steerlab.core._characters import check_whole
from steerlab.core._numbers import as_integer, as_list, shown
from steerlab.core.errors import PlanError

Sequence: TypeAlias = tuple[int, ...]
"""Token ids that follow each other."""
Marker: TypeAlias = tuple[str | Sequence, ...]
"""Any of some sequences; one that is a text stands for the tokens that spell it."""


def as_marker(given: Any, argument: str) -> Marker:
    """What an argument names as an event.

    Args:
        given: a token id; a text; a list of ids, one after the other; a set, or a list that holds more than ids, of
            such, any of which will do.
        argument: its name, for errors.

    Raises:
        PlanError: for anything else.

    Examples:
        >>> as_marker(5, "start"), as_marker([5, 6], "start"), as_marker(["</think>", 5], "start")
        (((5,),), ((5, 6),), ('</think>', (5,)))
    """
    one = _sequence(given, argument)
    if one is not None:
        return (one,)
    parts = as_list(given) or []
    found = [
        _sequence(part, argument) for part in (sorted(parts, key=repr) if isinstance(given, set | frozenset) else parts)
    ]
    if not found or any(part is None for part in found):
        raise PlanError(
            f"{argument} takes a token id, a text, a list of ids that follow each other, or a set of such of which any "
            f"will do; got {shown(given)}."
        )
    return tuple(dict.fromkeys(part for part in found if part is not None))


def _sequence(given: Any, argument: str) -> str | Sequence | None:
    """One text, id or list of ids; None for something else."""
    if isinstance(given, str):
        if not given:
            raise PlanError(f"{argument} is an empty text, which no token spells.")
        check_whole(given, argument, PlanError)
        return given
    if isinstance(given, set | frozenset):
        (only,) = given if len(given) == 1 else (None,)
        return None if only is None else _sequence(only, argument)
    number = as_integer(given)
    ids = [number] if number is not None else [as_integer(part) for part in as_list(given) or [None]]
    known = tuple(part for part in ids if part is not None)
    if not ids or len(known) < len(ids):
        return None
    if min(known) < 0:
        raise PlanError(f"{argument} holds token ids, integers ≥ 0; got {shown(given)}.")
    return known


def sequences_of(marker: Marker, argument: str) -> tuple[Sequence, ...]:
    """The sequences of an event whose texts have been spelled.

    Raises:
        PlanError: if one is still a text.
    """
    texts = [part for part in marker if isinstance(part, str)]
    if texts:
        raise _unspelled(texts[0], argument)
    return tuple(part for part in marker if not isinstance(part, str))


def _unspelled(text: str, argument: str) -> PlanError:
    return PlanError(
        f"{argument} is the text {text!r}, which takes the model's tokenizer to find, and here there is none; give "
        "token ids."
    )


def are_known(*markers: Marker) -> bool:
    """Whether none of these events is still a text."""
    return not any(isinstance(part, str) for marker in markers for part in marker)


def spelled(marker: Marker, tokenizer: Any, argument: str) -> Marker:
    """The event with its texts as token ids.

    Raises:
        PlanError: for a text that gives no token, or one that the vocabulary lacks.
    """
    return tuple(dict.fromkeys(_ids(part, tokenizer, argument) if isinstance(part, str) else part for part in marker))


def _ids(text: str, tokenizer: Any, argument: str) -> Sequence:
    if tokenizer is None:
        raise _unspelled(text, argument)
    found = tuple(map(int, tokenizer(text, add_special_tokens=False)["input_ids"]))
    unknown = getattr(tokenizer, "unk_token_id", None)
    is_unknown = unknown is not None and unknown in found and text != getattr(tokenizer, "unk_token", None)
    if not found or is_unknown:
        raise PlanError(
            f"{argument}={text!r} cannot be written in this model's tokens: its tokenizer gives {list(found)}. "
            "Give the token ids that stand for it."
        )
    return found


def can_coincide(one: Iterable[Sequence], other: Iterable[Sequence]) -> bool:
    """Whether a single token can complete an event of each kind."""
    others = list(other)
    return any(a[-len(b) :] == b or b[-len(a) :] == a for a in one for b in others)


def told(marker: Marker) -> str:
    """The event as a call would name it."""
    parts = [_told(part) for part in marker]
    return parts[0] if len(parts) == 1 else f"{{{', '.join(parts)}}}"


def _told(part: str | Sequence) -> str:
    if isinstance(part, str):
        return repr(part)
    return str(part[0]) if len(part) == 1 else f"({', '.join(map(str, part))})"
