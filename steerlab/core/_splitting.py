"""Splits data by group, so that nothing measured on one part was seen in the other."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from steerlab.core._numbers import as_integer, as_list, as_number, shown
from steerlab.core._seeds import check_single_seed
from steerlab.core._text import PromptLike
from steerlab.core.errors import DataError


def split_groups(groups: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of two disjoint parts; a group is never divided.

    Args:
        groups: a group name per row.
        fraction: share of the rows wanted in the first part; groups make it approximate.
        seed: of the shuffle over groups.

    Raises:
        DataError: if the fraction is not between 0 and 1, or a part would be empty.
    """
    share = as_number(fraction)
    if share is None or not 0 < share < 1:
        raise DataError(f"fraction is between 0 and 1, got {shown(fraction)}.")
    order = np.random.default_rng(check_single_seed(seed)).permutation(sorted(set(groups))).tolist()
    sizes, first, inside = Counter(groups), set[str](), 0
    for name in order:
        if inside + sizes[name] / 2 <= share * len(groups):
            first.add(name)
            inside += sizes[name]
    left = [i for i, group in enumerate(groups) if group in first]
    right = [i for i, group in enumerate(groups) if group not in first]
    if not left or not right:
        raise DataError(
            f"The {len(order)} groups cannot be divided at {fraction}: one side would be empty. "
            "Use more groups, or another fraction."
        )
    return left, right


def row_indices(indices: Any, n_rows: int) -> list[int]:
    """Indices of rows, as integers.

    Raises:
        DataError: for something else, a mask of booleans included, or a row that is not there.
    """
    listed = as_list(indices)
    found = [as_integer(i) for i in listed or ()]
    if listed is None or None in found:
        raise DataError(f"Rows are taken by a list of their indices, integers; got {shown(indices)}.")
    inside = [i for i in found if i is not None and -n_rows <= i < n_rows]
    if len(inside) < len(found):
        outside = next(i for i in found if i not in inside)
        raise DataError(f"There are {n_rows} rows, 0 to {n_rows - 1}; row {outside} is none of them.")
    return inside


def check_no_leak(left: Iterable[PromptLike], right: Iterable[PromptLike]) -> None:
    """Checks that no prompt stands in both parts, whatever its role there.

    Raises:
        DataError: naming a prompt that does.
    """
    shared = {_key(prompt) for prompt in left} & {_key(prompt) for prompt in right}
    if shared:
        raise DataError(f"A text stands in both parts of the split: {min(shared)!r:.80}; give its rows one group.")


def check_groups_apart(prompts: Iterable[PromptLike], groups: Iterable[str]) -> None:
    """Checks that no prompt stands in two groups, so that groups can be held out of each other.

    Raises:
        DataError: naming a prompt that does.
    """
    seen: dict[str, str] = {}
    for prompt, group in zip(prompts, groups, strict=True):
        first = seen.setdefault(_key(prompt), group)
        if first != group:
            raise DataError(
                f"A text stands in the groups {first!r} and {group!r}: {_key(prompt)!r:.80}; give its rows one group."
            )


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, sort_keys=True, default=dict)
