"""Converts numbers and lists of any library (arrays, tensors, series, their scalars) to Python's own types.

What a caller passes goes through here where it enters, so that equal numbers of different types mean the same, hash the
same and serialise the same. A bool is never a number, and text never is.
"""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias

from steerlab.core.errors import InputError

Integer: TypeAlias = SupportsIndex
"""An integer of any library, as an argument."""
Number: TypeAlias = SupportsFloat
"""A number of any library, as an argument."""


def plain(value: Any) -> Any:
    """A scalar of NumPy, torch or the like as Python's own; anything else as it is.

    Examples:
        >>> import numpy as np
        >>> plain(np.float32(0.5)), plain(np.array(3)), plain("a")
        (0.5, 3, 'a')
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        try:
            return value.item()
        except (RuntimeError, ValueError, TypeError):  # a tensor without data, say
            return value
    return value


def as_integer(value: Any) -> int | None:
    """The value as an int, if it is an integer of any library; else None.

    Examples:
        >>> as_integer(True), as_integer(3.0), as_integer(3)
        (None, None, 3)
    """
    found = plain(value)
    return int(found) if isinstance(found, Integral) and not isinstance(found, bool) else None


def as_number(value: Any, *, infinite: bool = False) -> float | None:
    """The value as a float, if it is a finite real number of any library; else None. There is one zero, without a sign.

    Args:
        value: what was given.
        infinite: take infinities too; NaN never.

    Examples:
        >>> as_number(-0.0), as_number(Decimal("0.5")), as_number(math.nan), as_number(True)
        (0.0, 0.5, None, None)
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, Real | Decimal):
        return None
    try:
        number = float(found)
    except (OverflowError, ValueError):
        return None
    fits = not math.isnan(number) if infinite else math.isfinite(number)
    return number + 0.0 if fits else None


def as_list(values: Any, *, ordered: bool = False) -> list[Any] | None:
    """The elements of a list, tuple, range, array, tensor, series or generator, scalars as Python's own; else None.

    Rows of arrays become lists. Text, mappings and single numbers are no lists.

    Args:
        values: what was given.
        ordered: take no set either.

    Examples:
        >>> import numpy as np
        >>> as_list(np.array([[1, 2], [3, 4]])), as_list(range(2)), as_list("ab")
        ([[1, 2], [3, 4]], [0, 1], None)
    """
    if isinstance(values, str | bytes | Mapping) or (ordered and isinstance(values, set | frozenset)):
        return None
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, Iterable) or getattr(values, "shape", None) == ():
        return None
    return [plain(value) for value in found]


def check_integer(
    value: Any, name: str, *, least: int, most: int | None = None, error: type[InputError] = InputError
) -> int:
    """The value as an int within bounds.

    Raises:
        InputError: otherwise, or the given error; names the value seen.
    """
    found = as_integer(value)
    if found is None or found < least or (most is not None and found > most):
        bounds = f"≥ {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name} is an integer {bounds}, got {shown(value)}.")
    return found


def check_number(
    value: Any,
    name: str,
    *,
    least: float | None = None,
    infinite: bool = False,
    error: type[InputError] = InputError,
) -> float:
    """The value as a float, of at least a bound if there is one.

    Raises:
        InputError: otherwise, or the given error; names the value seen.
    """
    found = as_number(value, infinite=infinite)
    if found is None or (least is not None and found < least):
        bound = "" if least is None else f" ≥ {least:g}"
        raise error(f"{name} is a {'' if infinite else 'finite '}number{bound}, got {shown(value)}.")
    return found


def check_flag(value: Any, name: str) -> bool:
    """The value as a bool; numbers and texts are refused.

    Raises:
        InputError: for anything but True or False.
    """
    found = plain(value)
    if not isinstance(found, bool):
        raise InputError(f"{name} is True or False, got {shown(value)}.")
    return found


def shown(value: Any, width: int = 80) -> str:
    """The value as an error shows it: its representation, shortened; huge integers by their size.

    Examples:
        >>> shown("0.2"), shown(10**5000)
        ("'0.2'", 'an integer of 16610 bits')
    """
    try:
        return f"{value!r:.{width}}"
    except ValueError:  # Python writes no integer of more than some thousand digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
