"""Arguments that several protocols take."""

from collections.abc import Mapping
from typing import Any

from steerlab.core._numbers import as_list, as_number, shown
from steerlab.core.errors import InputError
from steerlab.protocols.choices import ChoiceItems


def behaviours_of(behaviours: Any) -> dict[str, ChoiceItems]:
    """Questions by the name of the behaviour.

    Raises:
        InputError: for something else, or none.
    """
    good = isinstance(behaviours, Mapping) and behaviours
    if not good or not all(isinstance(items, ChoiceItems) for items in behaviours.values()):
        raise InputError(
            "behaviours are questions by name, {'survival': ChoiceItems.from_jsonl(…)}, at least one; got "
            f"{shown(behaviours)}."
        )
    return {str(name): items for name, items in behaviours.items()}


def multipliers_of(multipliers: Any) -> list[float]:
    """Multipliers in ascending order.

    Raises:
        InputError: for fewer than two, or one that stands twice.
    """
    found = [as_number(one) for one in as_list(multipliers) or ()]
    numbers = sorted({one for one in found if one is not None})
    if len(numbers) < 2 or len(numbers) < len(found):
        raise InputError(f"multipliers are two or more distinct finite numbers, got {shown(multipliers)}.")
    return numbers
