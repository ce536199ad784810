"""Where generated texts end: EOS ids, stop strings, and the text that is left."""

from collections.abc import Sequence
from typing import Any

from steerlab.core._characters import check_whole
from steerlab.core.errors import InputError


def eos_ids_of(*sources: Any) -> frozenset[int]:
    """Every `eos_token_id` that these state: a tokenizer, a configuration, a generation configuration, or None."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        InputError: for something that is neither a string nor a list of strings, for an empty string, or for half a
            character.
    """
    found = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple | set) else None
    if found is None or not all(isinstance(string, str) for string in found):
        raise InputError(f"stop takes a string or a list of strings, got {stop!r:.80}.")
    if not all(found):
        raise InputError("A stop string is empty; it would end every row at once.")
    check_whole(found, "A stop string", InputError)
    return found


def find_stop(text: str, strings: Sequence[str]) -> int | None:
    """Where the earliest stop string begins, if there is one."""
    found = [place for place in (text.find(string) for string in strings) if place >= 0]
    return min(found) if found else None


def before_stop(text: str, strings: Sequence[str]) -> str:
    """The text up to the earliest stop string, all of it without one."""
    return text[: find_stop(text, strings)]
