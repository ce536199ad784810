"""Targets: the texts that are scored after each prompt, each with a label (+1 or −1)."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steerlab.core._ab_questions import read_ab_questions
from steerlab.core._characters import check_whole
from steerlab.core._hashing import content_hash
from steerlab.core._records import (
    PlacedRow,
    field,
    frame_rows,
    of_split,
    placed_records,
    prompt_field,
    read_csv,
    read_jsonl,
    target_field,
)
from steerlab.core._splitting import check_no_leak, row_indices, split_groups
from steerlab.core._text import PromptLike, TargetLike, plain_text, prompt_words
from steerlab.core._warning import warn
from steerlab.core.errors import DataError
from steerlab.display import Piece, Shown, Table, count

if TYPE_CHECKING:
    import pandas as pd

ITEMS_SHOWN = 20

# What a label may look like where every value is text.
_CSV_LABELS = {"1": 1, "+1": 1, "-1": -1}


@dataclass(frozen=True)
class TargetItem:
    """One item of an experiment: a prompt with targets that show the property and targets that show its opposite.

    Attributes:
        prompt: text, chat messages or token ids.
        positives: targets with label +1, at least one.
        negatives: targets with label −1, at least one.
        group: items of one group are not independent; intervals are over groups.
    """

    prompt: PromptLike
    positives: tuple[TargetLike, ...]
    negatives: tuple[TargetLike, ...]
    group: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", plain_text(self.prompt))
        for side in ("positives", "negatives"):
            object.__setattr__(self, side, tuple(map(plain_text, getattr(self, side))))

    @property
    def targets(self) -> list[TargetLike]:
        """Positives, then negatives."""
        return [*self.positives, *self.negatives]


@dataclass(frozen=True, repr=False)
class Targets(Shown):
    """Items to measure an effect on; an item is a prompt.

    Raises:
        DataError: if there is no item, an item lacks a positive or a negative target, has one target on both sides, or
            holds half a character.

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
            if not isinstance(item, TargetItem):
                raise DataError(f"Targets hold TargetItems, got {item!r:.80}; build them with Targets.from_records.")
            if not item.positives or not item.negatives:
                side = "negative (label -1)" if item.positives else "positive (label 1)"
                raise DataError(f"The prompt {item.prompt!r:.80} has no {side} target; each item needs both sides.")
            check_whole([item.prompt, item.targets, item.group], "An item", DataError)
            both = next((target for target in item.positives if target in item.negatives), None)
            if both is not None:
                raise DataError(f"The prompt {item.prompt!r:.80} has the target {both!r:.60} with both labels.")
        twice = [(i.prompt, t) for i in self.items for k, t in enumerate(i.targets) if t in i.targets[:k]]
        if twice:
            prompt, target = twice[0]
            warn(
                f"{count(len(twice), 'target')} stand more than once at their prompt, and each counts; the first is "
                f"{target!r:.60} at {prompt!r:.80}."
            )

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[TargetItem]:
        return iter(self.items)

    def _finding(self) -> str:
        n_targets, n_groups = sum(len(item.targets) for item in self), len(set(self.groups))
        numbers = f"{count(len(self), 'item')} with {count(n_targets, 'target')} in {count(n_groups, 'group')}"
        return f"{numbers}, {self.hash}"

    def _pieces(self) -> Sequence[Piece]:
        rows = [
            (prompt_words(i.prompt), _side(i.positives), _side(i.negatives), i.group) for i in self.items[:ITEMS_SHOWN]
        ]
        columns = ["prompt", "positive targets", "negative targets", "group"]
        return [Table(columns, rows, more=".to_frame()", total=len(self))]

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> "Targets":
        """Items from rows of `prompt`, `target`, `label` (+1 or −1) and optionally `group`.

        Rows with the same prompt and group form one item, in order of first appearance. Without a group each prompt is
        a group of its own.

        Raises:
            DataError: for a row that is no dictionary, lacks a field or has another label.
        """
        return cls._from_places(placed_records(records))

    @classmethod
    def from_jsonl(cls, path: str | Path, *, split: str | None = None) -> "Targets":
        """Items from a file of such rows, as JSON lines or as one JSON array.

        `split` keeps rows whose `split` field equals it.

        Raises:
            DataError: with file and line, for a bad row, or if no row is left.
        """
        return cls._from_places(of_split(read_jsonl(path), split, path, "targets"))

    @classmethod
    def from_ab_questions(cls, path: str | Path, *, chat: bool = False, split: str | None = None) -> "Targets":
        """Items of one question each: the letter of the answer that shows the behaviour, against the other letter.

        The prompt ends in the bracket before the letter, so that what is scored is the answer's token alone.

        Args:
            path: as for `ContrastPairs.from_ab_questions`.
            chat: as a chat, with the answer begun by the assistant, rather than as text.
            split: keep only rows whose `split` field equals this; None keeps all.

        Raises:
            DataError: with file and line, for a row that lacks a field, or whose answers are no two letters.
        """
        return cls.from_records(
            {"prompt": question.prompt(chat=chat), "target": letter, "label": label}
            for question in read_ab_questions(path, split)
            for letter, label in ((question.matching, 1), (question.other, -1))
        )

    @classmethod
    def from_csv(cls, path: str | Path, *, split: str | None = None) -> "Targets":
        """Items from a CSV file with such columns, a target a row. Chats and token ids need JSON lines.

        Args:
            path: the file, comma-separated, UTF-8, with a header.
            split: keep only rows whose `split` cell equals this; None keeps all.

        Raises:
            DataError: with file and line, for a bad row, or if no row is left.
        """
        rows = of_split(read_csv(path), split, path, "targets")
        return cls._from_places((place, row | _csv_label(row)) for place, row in rows)

    @classmethod
    def from_frame(cls, frame: Any, *, split: str | None = None) -> "Targets":
        """Items from a pandas or polars frame with such columns, a target a row.

        Args:
            frame: the frame.
            split: keep only rows whose `split` value equals this; None keeps all.

        Raises:
            DataError: with the row's number from 0, for a bad row, or if no row is left.
        """
        return cls._from_places(of_split(frame_rows(frame), split, "The frame", "targets"))

    @classmethod
    def _from_places(cls, rows: Iterable[PlacedRow]) -> "Targets":
        return cls(items_of(rows))

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

    def take(self, indices: Any) -> "Targets":
        """The items at these indices, in this order."""
        return Targets(tuple(self.items[i] for i in row_indices(indices, len(self.items))))

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row per target: `prompt`, `target`, `label`, `group`; `from_frame` reads it back."""
        import pandas as pd

        rows = [
            {"prompt": item.prompt, "target": target, "label": label, "group": item.group}
            for item in self.items
            for label, side in ((1, item.positives), (-1, item.negatives))
            for target in side
        ]
        return pd.DataFrame(rows)

    def split(self, fraction: float = 0.8, *, seed: int = 0) -> tuple["Targets", "Targets"]:
        """Two disjoint sets of items; a group is never divided, and no prompt stands on both sides.

        Args:
            fraction: share of the items wanted in the first set; groups make it approximate.
            seed: of the shuffle over groups.

        Raises:
            DataError: if a side would be empty, or two groups share a prompt.
        """
        left, right = (self.take(part) for part in split_groups(self.groups, fraction, seed))
        check_no_leak(left.prompts, right.prompts)
        return left, right


def items_of(rows: Iterable[PlacedRow]) -> tuple[TargetItem, ...]:
    """The items of rows of `prompt`, `target`, `label` and optionally `group`; either side may be empty.

    Raises:
        DataError: for a row that lacks a field or has another label.
    """
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
    return tuple(
        TargetItem(prompt, tuple(by_label[1]), tuple(by_label[-1]), group) for prompt, group, by_label in sides.values()
    )


def _side(targets: Sequence[TargetLike]) -> str:
    """Targets of one side, a line each, white space at their ends visible."""
    return "\n".join(repr(target) if isinstance(target, str) else str(list(target)) for target in targets)


def _csv_label(row: dict[str, Any]) -> dict[str, int]:
    """The row's label as a number, if it is a known one; others are returned as they are, for the error message."""
    label = _CSV_LABELS.get(str(row.get("label")).strip())
    return {} if label is None else {"label": label}
