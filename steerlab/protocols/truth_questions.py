"""Questions with several true and several false answers, in the form of TruthfulQA's multiple-choice file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steerlab.core._hashing import content_hash
from steerlab.core._numbers import shown
from steerlab.core._records import placed_records, read_jsonl
from steerlab.core._text import PromptLike
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import DataError
from steerlab.display import Piece, Shown, Table, count, shortened


@dataclass(frozen=True)
class TruthQuestion:
    """One question.

    Attributes:
        question: as it is asked.
        true: true answers, the best one first.
        false: false answers.
    """

    question: str
    true: tuple[str, ...]
    false: tuple[str, ...]

    @property
    def answers(self) -> list[str]:
        """All answers, the true ones first."""
        return [*self.true, *self.false]

    def prompt(self, *, chat: bool, before: str = "") -> PromptLike:
        """The question as a prompt that an answer follows.

        Args:
            chat: as a user's turn; else as plain text after `Q:`.
            before: text before the question, with its own separator, e.g. questions with their answers.
        """
        if chat:
            return [{"role": "user", "content": before + self.question}]
        return f"{before}Q: {self.question}\nA:"

    def continuation(self, answer: str, *, chat: bool) -> str:
        """An answer as what follows the prompt."""
        return answer if chat else f" {answer}"

    def answered(self, answer: str, *, chat: bool, before: str = "") -> PromptLike:
        """The prompt with an answer at its end, where an activation is read."""
        prompt: Any = self.prompt(chat=chat, before=before)
        if chat:
            return [*prompt, {"role": "assistant", "content": answer}]
        return prompt + self.continuation(answer, chat=False)


@dataclass(frozen=True, repr=False)
class TruthQuestions(Shown):
    """Questions with true and false answers.

    Raises:
        DataError: if there is none, or one is asked twice.

    Examples:
        >>> questions = TruthQuestions.from_records([{
        ...     "question": "What do cows drink?",
        ...     "mc2_targets": {"Water": 1, "Cows drink water": 1, "Milk": 0},
        ... }])
        >>> questions.items[0].true
        ('Water', 'Cows drink water')
    """

    items: tuple[TruthQuestion, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError("There are no questions; pass at least one.")
        asked = [item.question for item in self.items]
        if len(set(asked)) < len(asked):
            twice = next(one for one in asked if asked.count(one) > 1)
            raise DataError(f"The question {twice!r:.80} stands twice.")

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[TruthQuestion]:
        return iter(self.items)

    def _finding(self) -> str:
        return f"{count(len(self), 'question')}, {self.hash}"

    def _pieces(self) -> Sequence[Piece]:
        rows = [
            (shortened(item.question, 200), shortened(item.true[0], 80), len(item.true), len(item.false))
            for item in self.items[:20]
        ]
        return [Table(["question", "best answer", "true", "false"], rows, total=len(self))]

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> "TruthQuestions":
        """Questions from rows of `question`, `mc2_targets` and, if the best answer is not its first, `mc1_targets`.

        Both map answers to 1 (true) or 0 (false), `mc1_targets` with one true answer: the best.

        Raises:
            DataError: for a row without these, or without a true or a false answer.
        """
        return cls(tuple(_question(row, place) for place, row in placed_records(records)))

    @classmethod
    def from_jsonl(cls, path: str | Path) -> "TruthQuestions":
        """Questions from a file of such rows, as JSON lines or as one JSON array: TruthfulQA's `mc_task.json`.

        Raises:
            DataError: with file and line, for a bad row.
        """
        return cls(tuple(_question(row, place) for place, row in read_jsonl(path)))

    @property
    def hash(self) -> str:
        """Content hash of all questions, in order."""
        return content_hash([[item.question, item.true, item.false] for item in self])

    def halves(self, *, seed: int) -> tuple["TruthQuestions", "TruthQuestions"]:
        """Two halves drawn without replacement.

        Raises:
            DataError: for a single question.
        """
        if len(self) < 2:
            raise DataError("A single question has no two halves.")
        order = np.random.default_rng(seed).permutation(len(self))
        first, second = (tuple(self.items[k] for k in sorted(part)) for part in np.array_split(order, 2))
        return TruthQuestions(first), TruthQuestions(second)

    def pairs(self, *, chat: bool, before: str = "") -> ContrastPairs:
        """Contrast pairs of a question with a true and with a false answer, in order; their group is the question."""
        found = [
            (item.answered(true, chat=chat, before=before), item.answered(false, chat=chat, before=before), item)
            for item in self
            for true, false in zip(item.true, item.false, strict=False)  # answers of the longer side are left over
        ]
        positives, negatives, items = zip(*found, strict=True)
        return ContrastPairs(positives, negatives, tuple(item.question for item in items))


def _question(row: Any, place: str) -> TruthQuestion:
    question, targets = (row.get(name) for name in ("question", "mc2_targets")) if isinstance(row, Mapping) else (0, 0)
    if not isinstance(question, str) or not question.strip() or not isinstance(targets, Mapping):
        raise DataError(
            f"{place} needs question, a text, and mc2_targets, answers with 1 or 0; it has {list(row) or row!r:.80}."
        )
    true, false = ([answer for answer, label in targets.items() if label == wanted] for wanted in (1, 0))
    if not true or not false or len(true) + len(false) < len(targets) or not all(map(str.strip, targets)):
        raise DataError(
            f"{place}: mc2_targets are answers with 1 or 0, at least one of each; got {shown(dict(targets))}."
        )
    best = [answer for answer, label in (row.get("mc1_targets") or {}).items() if label == 1]
    if len(best) > 1 or not set(best) <= set(true):
        raise DataError(f"{place}: the true answer of mc1_targets is one of those of mc2_targets; got {best!r:.80}.")
    first = best or true[:1]
    return TruthQuestion(question.strip(), (*first, *(one for one in true if one not in first)), tuple(false))
