"""Arguments that several protocols take."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from steerlab.core._numbers import as_list, as_number, shown
from steerlab.core.errors import DataError, InputError
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


def texts_of(texts: Any, name: str) -> list[str]:
    """A list of texts.

    Raises:
        InputError: for something else, an empty text, or none.
    """
    found = None if isinstance(texts, str) else as_list(texts, ordered=True)
    if not found or not all(isinstance(text, str) and text for text in found):
        raise InputError(f"{name} is a list of texts, at least one; got {shown(texts)}.")
    return found


def split_both(kinds: Mapping[str, list[str]], shares: Sequence[float], seed: int) -> list[list[list[str]]]:
    """Two kinds of instructions in parts, each part with as many of both.

    Args:
        kinds: the texts of each kind by its name.
        shares: of the parts.
        seed: of the draw.

    Raises:
        DataError: for too few texts, not as many of both kinds, or one that stands twice.
    """
    (first, second), names = kinds.values(), list(kinds)
    if len(first) != len(second):
        raise DataError(f"There are {len(first)} {names[0]} and {len(second)} {names[1]} instructions; give as many.")
    if set(first) & set(second) or len(set(first)) < len(first) or len(set(second)) < len(second):
        raise DataError(f"An instruction stands twice; each is {names[0]} or {names[1]}, once.")
    cuts = np.round(np.cumsum([0.0, *shares]) * len(first)).astype(int)
    if np.diff(cuts).min() < 1:
        raise DataError(f"{len(first)} instructions are too few for parts of {list(shares)}; give more of both.")
    order = [np.random.default_rng([seed, kind]).permutation(len(first)) for kind in range(2)]
    return [
        [[texts[k] for k in own[start:stop]] for start, stop in pairwise(cuts)]
        for texts, own in zip((first, second), order, strict=True)
    ]
