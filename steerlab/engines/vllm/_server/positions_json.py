"""Positions as a client writes them: a simple word, or what `Where.to_json` gives; bounded in size."""

from collections.abc import Iterator
from typing import Any

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import PlanError
from steerlab.steering.positions import where as positions
from steerlab.steering.positions._by_tokens import Ids
from steerlab.steering.positions.where import Where

WORDS = ("default", "all", "prompt", "last_prompt", "generated")
MAX_PARTS = 64
MAX_IDS = 32


def where_of(given: Any, info: ModelInfo) -> Where:
    """The set of positions that a client described.

    Raises:
        PlanError: if it is not a description, says more than is understood, or goes beyond what a request can need.
    """
    if isinstance(given, str):
        return _of_word(given)
    _check_size(given, info)
    try:
        found = positions.from_json(given)
    except (ValueError, OverflowError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"Not a description of positions: {given!r:.120}.") from error
    if found.to_json() != given:
        raise PlanError(f"{given!r:.120} says more than positions can; it was read as {found.to_json()!r:.120}.")
    for leaf in found.leaves():
        if isinstance(leaf, Ids) and len(leaf.token_ids) > MAX_IDS:
            raise PlanError(f"ids takes at most {MAX_IDS} token ids in a request, got {len(leaf.token_ids)}.")
    return found


def _of_word(word: str) -> Where:
    if word not in WORDS:
        raise PlanError(
            f"{word[:80]!r} names no positions; write one of {', '.join(WORDS)}, or an object as Where.to_json gives."
        )
    return getattr(positions, word)()


def _check_size(given: Any, info: ModelInfo) -> None:
    limit = max(info.context_length, info.d_vocab)
    n_parts = 0
    for part in _walk(given):
        n_parts += isinstance(part, dict)
        if n_parts > MAX_PARTS:
            raise PlanError(f"Positions are combined from at most {MAX_PARTS} parts.")
        if isinstance(part, int | float) and not abs(part) <= limit:
            raise PlanError(f"Positions hold {part!r:.40}, beyond the context and the vocabulary of {info.name}.")
        if isinstance(part, list) and len(part) > info.context_length:
            raise PlanError(f"Positions list {len(part)} entries; the context of {info.name} is {info.context_length}.")


def _walk(given: Any) -> Iterator[Any]:
    """A description and everything in it; without recursion, for it may be deep."""
    waiting = [given]
    while waiting:
        part = waiting.pop()
        yield part
        waiting.extend(part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
