"""The data of methods that learn an edit: prompts with wanted completions, and perhaps unwanted ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from steerlab.core._hashing import content_hash
from steerlab.core._records import placed_records
from steerlab.core._splitting import check_no_leak, split_groups
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import DataError
from steerlab.core.targets import TargetItem, Targets, items_of


@dataclass(frozen=True)
class Examples:
    """Prompts with completions: positive targets are wanted, negative ones are not.

    Attributes:
        items: an item per prompt; each has a wanted completion.
    """

    items: tuple[TargetItem, ...]

    @classmethod
    def of(cls, data: Any, name: str) -> "Examples":
        """From `Targets`, or from records of `prompt`, `target`, and optionally `label` (+1 unless given) and `group`.

        Args:
            data: the data.
            name: what takes them, for messages.

        Raises:
            DataError: for something else, a bad row, or an item without a wanted completion.
        """
        if isinstance(data, Targets):
            return cls(data.items)
        if isinstance(data, ContrastPairs):
            raise DataError(
                f"{name} learns from completions, and contrast pairs have none. Give Targets, or records such as "
                "{'prompt': 'The film was', 'target': ' great'}; pairs are for methods that read, such as 'mean_diff'."
            )
        if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
            raise DataError(
                f"{name} takes Targets, or records of prompt and target (and label 1 or -1); got {type(data).__name__}."
            )
        items = items_of((place, {"label": 1} | dict(row)) for place, row in placed_records(data))
        if not items:
            raise DataError(f"{name} has no records to learn from; pass three prompts or more with a completion.")
        for item in items:
            if not item.positives:
                raise DataError(f"The prompt {item.prompt!r:.80} has no wanted completion (label 1); each needs one.")
        return cls(items)

    @property
    def hash(self) -> str:
        """Content hash of all items in order, the same as that of equal Targets."""
        return content_hash([[i.prompt, i.positives, i.negatives, i.group] for i in self.items])

    def split(self, share: float, seed: int) -> tuple[list[int], list[int]]:
        """Indices of the items to fit and of the items held out; a group is never divided.

        Args:
            share: share of the items to hold out.
            seed: of the shuffle over groups.

        Raises:
            DataError: if a side would be empty, or two groups share a prompt.
        """
        groups = [item.group for item in self.items]
        try:
            held, fitted = split_groups(groups, share, seed)
        except DataError as error:
            n = len(set(groups))
            more = "another prompt of another group" if n < 2 else "more prompts of other groups, or validation=0.5"
            raise DataError(
                f"Of {n} group{'s' * (n > 1)} of prompts a share of {share:g} cannot be held out, with some left to "
                f"fit: give {more}."
            ) from error
        check_no_leak([self.items[i].prompt for i in fitted], [self.items[i].prompt for i in held])
        return fitted, held
