"""Questions with two answers, (A) and (B), one of which shows a behaviour."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steerlab.core._ab_questions import ABQuestion, ab_question
from steerlab.core._hashing import content_hash
from steerlab.core._records import placed_records, read_jsonl
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import DataError
from steerlab.core.targets import TargetItem, Targets
from steerlab.display import Piece, Shown, Table, count, shortened


@dataclass(frozen=True, repr=False)
class ChoiceItems(Shown):
    r"""Questions about one behaviour, as in the data sets of model-written evaluations.

    Raises:
        DataError: if there is none, or one is asked twice.

    Examples:
        >>> items = ChoiceItems.from_records([{
        ...     "question": "Shall we?\n (A) Yes\n (B) No",
        ...     "answer_matching_behavior": " (A)",
        ...     "answer_not_matching_behavior": " (B)",
        ... }])
        >>> items.items[0].matching
        'A'
    """

    items: tuple[ABQuestion, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError("There are no questions; pass at least one.")

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[ABQuestion]:
        return iter(self.items)

    def _finding(self) -> str:
        return f"{count(len(self), 'question')}, {self.hash}"

    def _pieces(self) -> Sequence[Piece]:
        rows = [(shortened(item.question, 200), item.matching, item.other) for item in self.items[:20]]
        return [Table(["question", "matching", "not matching"], rows, total=len(self))]

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> "ChoiceItems":
        """Items from rows of `question`, `answer_matching_behavior`, `answer_not_matching_behavior`.

        Raises:
            DataError: for a row without these, or whose answers are not two different letters of its choices.
        """
        return cls(tuple(ab_question(place, row) for place, row in placed_records(records)))

    @classmethod
    def from_jsonl(cls, path: str | Path) -> "ChoiceItems":
        """Items from a file of such rows, as JSON lines or as one JSON array: the format of `anthropics/evals`.

        Raises:
            DataError: with file and line, for a bad row.
        """
        return cls(tuple(ab_question(place, row) for place, row in read_jsonl(path)))

    @property
    def hash(self) -> str:
        """Content hash of all items, in order."""
        return content_hash([[item.question, item.matching, item.other] for item in self])

    def split(self, shares: Sequence[float], *, seed: int) -> list["ChoiceItems"]:
        """Parts with these shares of the questions, drawn without replacement; questions asked twice stay together.

        Raises:
            DataError: if a part would be empty.
        """
        names = list(dict.fromkeys(item.question for item in self))
        order = np.random.default_rng(seed).permutation(len(names))
        cuts = np.round(np.cumsum([0.0, *shares]) * len(names)).astype(int)
        place = {names[k]: int(np.searchsorted(cuts[1:], position, side="right")) for position, k in enumerate(order)}
        parts = [tuple(item for item in self if place[item.question] == k) for k in range(len(shares))]
        if not all(parts):
            sizes = [len(part) for part in parts]
            raise DataError(f"{len(self)} questions are too few for shares of {list(shares)}: parts of {sizes}.")
        return [ChoiceItems(part) for part in parts]

    def pairs(self, *, chat: bool) -> ContrastPairs:
        """Contrast pairs that differ in the letter of the answer alone, which is their last token."""
        positives = tuple(item.prompt(item.matching, chat=chat) for item in self)
        negatives = tuple(item.prompt(item.other, chat=chat) for item in self)
        return ContrastPairs(positives, negatives, tuple(item.question for item in self))

    def targets(self, *, chat: bool, before: str = "", system: str = "") -> Targets:
        """Items whose positive target is the letter of the matching answer, their group the question."""
        return Targets(
            tuple(
                TargetItem(
                    item.prompt(chat=chat, before=before, system=system), (item.matching,), (item.other,), item.question
                )
                for item in self
            )
        )
