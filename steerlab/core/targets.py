"""Targets: what is scored after each prompt, and which side each target speaks for."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerlab.core.errors import DataError
from steerlab.core.hashing import content_hash
from steerlab.core.records import field, prompt_field, read_jsonl, target_field
from steerlab.core.text import PromptLike, TargetLike


@dataclass(frozen=True)
class TargetItem:
    """One item of an experiment: a prompt with targets that show the property and targets that show its opposite.

    Attributes:
        prompt: text, chat messages or token ids.
        positives: targets with label +1, at least one.
        negatives: targets with label −1, at least one.
        group: items of one group are resampled together.
    """

    prompt: PromptLike
    positives: tuple[TargetLike, ...]
    negatives: tuple[TargetLike, ...]
    group: str

    @property
    def targets(self) -> list[TargetLike]:
        """Positives, then negatives."""
        return [*self.positives, *self.negatives]


@dataclass(frozen=True)
class Targets:
    """Items to measure an effect on; an item is a prompt.

    Raises:
        DataError: if there is no item, or an item lacks a positive or a negative target.

    Examples:
        >>> targets = Targets.from_records([
        ...     {"prompt": "The film was", "target": " great", "label": 1},
        ...     {"prompt": "The film was", "target": " awful", "label": -1},
        ... ])
        >>> len(targets)
        1
    """

    items: tuple[TargetItem, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError("There are no targets; pass at least one prompt with a positive and a negative target.")
        for item in self.items:
            if not item.positives or not item.negatives:
                side = "negative (label -1)" if item.positives else "positive (label 1)"
                raise DataError(f"The prompt {item.prompt!r:.80} has no {side} target; each item needs both sides.")

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[TargetItem]:
        return iter(self.items)

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> "Targets":
        """Items from rows of `prompt`, `target`, `label` (+1 or −1) and optionally `group`.

        Rows with the same prompt and group form one item, in order of first appearance. Without a group each prompt is
        a group of its own.

        Raises:
            DataError: for a row that lacks a field or has another label.
        """
        return cls._from_places((f"record {index}", dict(row)) for index, row in enumerate(records))

    @classmethod
    def from_jsonl(cls, path: str | Path, *, split: str | None = None) -> "Targets":
        """Items from a JSON-lines file of such rows; `split` keeps rows whose `split` field equals it.

        Raises:
            DataError: with file and line, for a bad row, or if no row is left.
        """
        rows = [(place, row) for place, row in read_jsonl(path) if split is None or row.get("split") == split]
        if not rows:
            raise DataError(f"{path} holds no targets" + (f" with split {split!r}." if split else "."))
        return cls._from_places(rows)

    @classmethod
    def _from_places(cls, rows: Iterable[tuple[str, dict[str, Any]]]) -> "Targets":
        sides: dict[tuple[str, str], tuple[PromptLike, str, dict[int, list[TargetLike]]]] = {}
        for place, row in rows:
            prompt, target = prompt_field(row, "prompt", place), target_field(row, "target", place)
            label = field(row, "label", place)
            if isinstance(label, bool) or label not in (1, -1):
                raise DataError(f"{place} has label {label!r}; a label is 1 or -1.")
            name = prompt if isinstance(prompt, str) else json.dumps(prompt)
            group = name if row.get("group") in (None, "") else str(row["group"])
            item = sides.setdefault((name, group), (prompt, group, {1: [], -1: []}))
            item[2][int(label)].append(target)
        return cls(
            tuple(
                TargetItem(prompt, tuple(by_label[1]), tuple(by_label[-1]), group)
                for prompt, group, by_label in sides.values()
            )
        )

    @property
    def prompts(self) -> list[PromptLike]:
        """One prompt per item."""
        return [item.prompt for item in self.items]

    @property
    def groups(self) -> list[str]:
        """One group name per item."""
        return [item.group for item in self.items]

    @property
    def hash(self) -> str:
        """Content hash of all items, in order."""
        return content_hash([[i.prompt, i.positives, i.negatives, i.group] for i in self.items])

    def take(self, indices: Sequence[int]) -> "Targets":
        """The items at these indices, in this order."""
        return Targets(tuple(self.items[i] for i in indices))
