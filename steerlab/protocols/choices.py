"""Questions with two answers, (A) and (B), one of which shows a behaviour."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steerlab.core._hashing import content_hash
from steerlab.core._records import read_jsonl
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import DataError
from steerlab.core.targets import TargetItem, Targets
from steerlab.display import Piece, Shown, Table, count, shortened

_LETTER = re.compile(r"^\s*\(?([A-Z])\)?[.:]?\s*$")
LEAD = "("
"""What stands before the letter of an answer."""


@dataclass(frozen=True)
class Choice:
    """One question.

    Attributes:
        question: with its choices, as it is asked.
        matching: the letter of the answer that shows the behaviour.
        other: the letter of the one that does not.
    """

    question: str
    matching: str
    other: str

    def prompt(self, *, chat: bool, before: str = "", system: str = "") -> PromptLike:
        """The question as a prompt that ends where the letter of the answer follows.

        Args:
            chat: as a user's turn, with the begun answer as the assistant's; else as plain text.
            before: text before the question, with its own separator.
            system: the system's message of the chat; before the question in plain text.
        """
        if not chat:
            head = f"{system}\n\n" if system else ""
            return f"{head}{before}{self.question}\n\nAnswer: {LEAD}"
        messages = [{"role": "user", "content": before + self.question}, {"role": "assistant", "content": LEAD}]
        return [{"role": "system", "content": system}, *messages] if system else messages

    def answered(self, letter: str, *, chat: bool) -> PromptLike:
        """The prompt with the letter of an answer at its end, where an activation is read."""
        prompt: Any = self.prompt(chat=chat)
        if isinstance(prompt, str):
            return prompt + letter
        return [*prompt[:-1], {"role": "assistant", "content": LEAD + letter}]


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

    items: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError("There are no questions; pass at least one.")

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Choice]:
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
            DataError: for a row without these, or whose answers are not two different letters.
        """
        return cls(tuple(_choice(row, f"Row {k}") for k, row in enumerate(records)))

    @classmethod
    def from_jsonl(cls, path: str | Path) -> "ChoiceItems":
        """Items from a file of such rows, as JSON lines or as one JSON array: the format of `anthropics/evals`.

        Raises:
            DataError: with file and line, for a bad row.
        """
        return cls(tuple(_choice(row, place) for place, row in read_jsonl(path)))

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
        positives = tuple(item.answered(item.matching, chat=chat) for item in self)
        negatives = tuple(item.answered(item.other, chat=chat) for item in self)
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


def _choice(row: Any, place: str) -> Choice:
    names = ("question", "answer_matching_behavior", "answer_not_matching_behavior")
    if not isinstance(row, Mapping) or any(not isinstance(row.get(name), str) for name in names):
        raise DataError(f"{place} needs the texts {', '.join(names)}; it has {list(row) if row else row!r:.80}.")
    found = [_LETTER.match(row[name]) for name in names[1:]]
    letters = [match[1] for match in found if match is not None]
    if len(letters) < 2 or letters[0] == letters[1]:
        answers = [row[name] for name in names[1:]]
        raise DataError(f"{place} has the answers {answers}; they are two different letters such as ' (A)' and ' (B)'.")
    return Choice(row["question"].strip(), *letters)
