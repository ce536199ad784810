"""Contrast pairs: the data a direction is extracted from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steerlab.core.errors import DataError
from steerlab.core.hashing import content_hash
from steerlab.core.records import field, prompt_field, read_jsonl
from steerlab.core.text import PromptLike


@dataclass(frozen=True)
class ContrastPairs:
    """Prompts in pairs that differ in one property: positive shows it, negative does not.

    Attributes:
        positives: prompts (text, chat messages or token ids) that show the property.
        negatives: their counterparts, in the same order.
        groups: a name per pair; pairs made from one template share it, and a split keeps a group together.

    Raises:
        DataError: if the lists differ in length, are empty, or a prompt is empty.

    Examples:
        >>> pairs = ContrastPairs.from_lists(["I love it."], ["I hate it."])
        >>> len(pairs)
        1
    """

    positives: tuple[PromptLike, ...]
    negatives: tuple[PromptLike, ...]
    groups: tuple[str, ...]

    def __post_init__(self) -> None:
        sizes = {len(self.positives), len(self.negatives), len(self.groups)}
        if len(sizes) != 1:
            raise DataError(
                "Positives, negatives and groups must have one length; got "
                f"{len(self.positives)}, {len(self.negatives)} and {len(self.groups)}."
            )
        if not self.positives:
            raise DataError("There are no contrast pairs; pass at least one.")
        for index, (positive, negative) in enumerate(self):
            if len(positive) == 0 or len(negative) == 0:
                raise DataError(f"Pair {index} has an empty side.")

    def __len__(self) -> int:
        return len(self.positives)

    def __iter__(self) -> Iterator[tuple[PromptLike, PromptLike]]:
        return iter(zip(self.positives, self.negatives, strict=True))

    @classmethod
    def from_lists(
        cls, positives: Sequence[PromptLike], negatives: Sequence[PromptLike], groups: Sequence[str] | None = None
    ) -> "ContrastPairs":
        """Pairs from two lists in the same order; without groups, each pair is a group of its own.

        Raises:
            DataError: if a side is one string rather than a list of prompts.
        """
        for side in (positives, negatives):
            if isinstance(side, str | bytes):
                raise DataError(f"Contrast pairs come as two lists of prompts, got the string {side!r:.60}.")
        names = [str(i) for i in range(len(positives))] if groups is None else [str(group) for group in groups]
        return cls(tuple(positives), tuple(negatives), tuple(names))

    @classmethod
    def from_jsonl(
        cls,
        path: str | Path,
        *,
        positive: str = "positive",
        negative: str = "negative",
        group: str | None = None,
        split: str | None = None,
    ) -> "ContrastPairs":
        """Pairs from a JSON-lines file.

        Args:
            path: the file, one JSON object a line.
            positive: key of the positive prompt.
            negative: key of the negative prompt.
            group: key of the group name; None makes each pair its own group.
            split: keep only rows whose `split` field equals this; None keeps all.

        Raises:
            DataError: with file and line, for a row that is not an object or lacks a key, or if no row is left.
        """
        rows = [(place, row) for place, row in read_jsonl(path) if split is None or row.get("split") == split]
        if not rows:
            raise DataError(f"{path} holds no contrast pairs" + (f" with split {split!r}." if split else "."))
        groups = None if group is None else [str(field(row, group, place)) for place, row in rows]
        return cls.from_lists(
            [prompt_field(row, positive, place) for place, row in rows],
            [prompt_field(row, negative, place) for place, row in rows],
            groups,
        )

    @property
    def hash(self) -> str:
        """Content hash of all pairs and groups, in order."""
        return content_hash([self.positives, self.negatives, self.groups])

    def take(self, indices: Sequence[int]) -> "ContrastPairs":
        """The pairs at these indices, in this order."""
        return ContrastPairs(
            tuple(self.positives[i] for i in indices),
            tuple(self.negatives[i] for i in indices),
            tuple(self.groups[i] for i in indices),
        )

    def flipped(self, flips: Sequence[bool]) -> "ContrastPairs":
        """The same pairs with positive and negative exchanged where `flips` is true."""
        if len(flips) != len(self):
            raise DataError(f"There are {len(self)} pairs and {len(flips)} flips; pass one per pair.")
        pairs = [(n, p) if flip else (p, n) for (p, n), flip in zip(self, flips, strict=True)]
        return ContrastPairs(tuple(p for p, _ in pairs), tuple(n for _, n in pairs), self.groups)

    def split(self, fraction: float = 0.8, *, seed: int = 0) -> tuple["ContrastPairs", "ContrastPairs"]:
        """Two disjoint sets of pairs; a group is never divided, and no text stands on both sides.

        Args:
            fraction: share of the pairs wanted in the first set; groups make it approximate.
            seed: of the shuffle over groups.

        Raises:
            DataError: if a side would be empty, or two groups share a text.
        """
        if not 0 < fraction < 1:
            raise DataError(f"fraction is between 0 and 1, got {fraction!r}.")
        order = np.random.default_rng(seed).permutation(sorted(set(self.groups))).tolist()
        first: set[str] = set()
        for name in order:
            inside = sum(group in first for group in self.groups)
            if inside + self.groups.count(name) / 2 <= fraction * len(self):
                first.add(name)
        left = [i for i, group in enumerate(self.groups) if group in first]
        right = [i for i, group in enumerate(self.groups) if group not in first]
        if not left or not right:
            raise DataError(
                f"The {len(order)} groups cannot be divided at {fraction}: one side would be empty. "
                "Use more groups, or another fraction."
            )
        pair_of_sets = self.take(left), self.take(right)
        _check_no_leak(*pair_of_sets)
        return pair_of_sets


def balanced_flips(groups: Sequence[str], rng: np.random.Generator) -> list[bool]:
    """Flips exactly half the pairs within each group; odd pairs left over are balanced against each other.

    Independent flips of clean pairs mostly give the same axis back, up to sign and strength; exactly half cancels the
    group's shared direction and leaves what the labels do not explain. Pairs that are each their own group are
    balanced as a whole.
    """
    flips = np.zeros(len(groups), dtype=bool)
    left_over = []
    for name in sorted(set(groups)):
        members = rng.permutation(np.flatnonzero([group == name for group in groups]))
        flips[members[: len(members) // 2]] = True
        left_over += members[len(members) // 2 * 2 :].tolist()
    odd = rng.permutation(np.array(left_over, dtype=int))
    half = len(odd) // 2 + (int(rng.integers(2)) if len(odd) % 2 else 0)
    flips[odd[:half]] = True
    return flips.tolist()


def _check_no_leak(left: ContrastPairs, right: ContrastPairs) -> None:
    shared = {_text(p) for pair in left for p in pair} & {_text(p) for pair in right for p in pair}
    if shared:
        raise DataError(f"A text stands in both parts of the split: {min(shared)!r:.80}; give its pairs one group.")


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
