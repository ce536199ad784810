"""Checks for lone surrogates: halves of characters, as a cut through an emoji in JSON leaves them."""

import re
from collections.abc import Mapping
from typing import Any

from steerlab.core.errors import InputError

_HALF = re.compile("[\ud800-\udfff]")


def half_character(value: Any) -> str | None:
    """The first text with half a character in it, in a text or inside lists and mappings; None if all are whole."""
    if isinstance(value, str):
        return value if not value.isascii() and _HALF.search(value) else None
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple):
        return None
    if value and type(value[0]) is int:  # token ids
        return None
    return next((found for item in value if (found := half_character(item)) is not None), None)


def check_whole(value: Any, what: str, error: type[InputError]) -> None:
    """Checks that every text in a value consists of whole characters.

    Raises:
        InputError: of the kind given, otherwise.
    """
    text = half_character(value)
    if text is None:
        return
    at = _HALF.search(text)
    assert at is not None
    start = max(0, at.start() - 20)
    raise error(
        f"{what} holds half a character, {at.group()!r} at position {at.start()}: {text[start : at.end() + 20]!r}. "
        "A text was cut inside an emoji or another character; cut it between characters, or take the half out."
    )
