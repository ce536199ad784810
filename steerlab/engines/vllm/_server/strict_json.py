"""A request's body, read as JSON is defined: no NaN, no number that becomes infinite, no half characters."""

import json
import math
from typing import Any, NoReturn

from steerlab.core._characters import check_whole
from steerlab.core.errors import InputError

MAX_DEPTH = 200
"""Levels that a body may be nested; deeper ones exhaust the stack of whatever walks through them."""

_LONGEST = 19
"""Digits of the largest 64-bit integer."""


class BodyError(InputError):
    """A body, rather than what one of its fields asks for, cannot be used."""


def read_json(text: str | bytes, what: str) -> Any:
    """What a JSON text says.

    Args:
        text: the text.
        what: what it is, for messages.

    Raises:
        BodyError: one sentence, if it is not JSON or holds what cannot be worked with.
    """
    try:
        found = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except BodyError as error:
        raise BodyError(f"{what}: {error}") from error
    except UnicodeDecodeError as error:
        raise BodyError(f"{what} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise BodyError(_too_deep(what)) from error
    except ValueError as error:
        raise BodyError(f"{what} is not JSON: {error}.") from error
    _check(found, what)
    return found


def _check(found: Any, what: str) -> None:
    """Level by level, without recursion."""
    level, depth = [found], 0
    while level:
        if depth > MAX_DEPTH:
            raise BodyError(_too_deep(what))
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                inner += [*part, *part.values()]
            elif isinstance(part, list):
                inner += [one for one in part if isinstance(one, str | dict | list)]
            elif isinstance(part, str) and not part.isascii():
                check_whole(part, what, BodyError)
        level, depth = inner, depth + 1


def _constant(name: str) -> NoReturn:
    raise BodyError(f"{name} is no number of JSON; send a finite number, or null to leave a field out.")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BodyError(f"the number {digits:.40} is beyond the range of 64-bit floating point.")
    return value


def _int(digits: str) -> int:
    if len(digits) < _LONGEST:
        return int(digits)
    if len(digits) > _LONGEST + 1 or not -(2**63) <= int(digits) < 2**63:
        raise BodyError(f"the integer {digits:.40} is beyond 64 bits.")
    return int(digits)


def _too_deep(what: str) -> str:
    return f"{what} is nested too deep; {MAX_DEPTH} levels are read."
