"""Questions with two lettered answers, one of which shows a behaviour: the data of contrastive activation addition.

A row has `question`, which ends in its choices, and `answer_matching_behavior` and `answer_not_matching_behavior`, such
as "(A)" and "(B)".

Source:
    Rimsky et al. 2023, Steering Llama 2 via Contrastive Activation Addition (arXiv:2312.06681), section 3; the names of
    the fields are those of Perez et al. 2022 (arXiv:2212.09251).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steerlab.core._records import field, of_split, read_jsonl
from steerlab.core._text import PromptLike
from steerlab.core._warning import warn
from steerlab.core.errors import DataError

_ANSWER: Final = re.compile(r"\s*\(?\s*([A-Z])\s*\)?\s*[.:]?\s*")
_CHOICE: Final = re.compile(r"(?:^|(?<=\s))\(([A-Z])\)|^[ \t]*([A-Z])[).:]", re.MULTILINE)
_KEYS: Final = ("answer_matching_behavior", "answer_not_matching_behavior")
_LEAD: Final = "\n\nAnswer: "


@dataclass(frozen=True)
class ABQuestion:
    """A question and the letters of its answers.

    Attributes:
        question: the question with its choices.
        matching: the letter of the answer that shows the behaviour.
        other: the letter of the one that does not.
    """

    question: str
    matching: str
    other: str

    def prompt(self, answer: str = "", *, chat: bool, before: str = "", system: str = "") -> PromptLike:
        """The question with the start of an answer: "(" and perhaps its letter.

        Args:
            answer: the letter, which is then the last token; empty where it is to follow.
            chat: as a user's turn, with the begun answer as the assistant's; else as plain text.
            before: text before the question, with its own separator.
            system: the system's message of the chat; before the question in plain text.
        """
        if not chat:
            head = f"{system}\n\n" if system else ""
            return f"{head}{before}{self.question}{_LEAD}({answer}"
        messages = [{"role": "user", "content": before + self.question}, {"role": "assistant", "content": f"({answer}"}]
        return [{"role": "system", "content": system}, *messages] if system else messages


def read_ab_questions(path: str | Path, split: str | None) -> list[ABQuestion]:
    """The questions of a JSON array, or of JSON lines.

    Raises:
        DataError: with file and line, for a row that lacks a field, or whose answers are no two of its letters.
    """
    rows = of_split(read_jsonl(path), split, path, "questions")
    found = [ab_question(place, row) for place, row in rows]
    _warn_of_letters(found)
    return found


def ab_question(place: str, row: dict) -> ABQuestion:
    """The question of a row.

    Raises:
        DataError: for a row that lacks a field, or whose answers are no two of its letters.
    """
    question = field(row, "question", place)
    if not isinstance(question, str):
        raise DataError(f"{place}: 'question' is text, got {question!r:.60}.")
    letters = [_letter(place, row, key) for key in _KEYS]
    if letters[0] == letters[1]:
        raise DataError(f"{place}: both answers are {letters[0]!r}; one shows the behaviour and the other does not.")
    _check_choices(place, question, letters)
    return ABQuestion(question.strip(), *letters)


def _letter(place: str, row: dict, key: str) -> str:
    value = field(row, key, place)
    match = _ANSWER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise DataError(f"{place}: {key!r} is a letter such as '(A)', got {value!r:.60}.")
    return match[1]


def _check_choices(place: str, question: str, letters: Sequence[str]) -> None:
    """Checks that the answers are among the question's choices: "(A) Yes" or, on a line of its own, "A. Yes"."""
    offered = sorted({bracketed or bare for bracketed, bare in _CHOICE.findall(question)})
    for key, letter in zip(_KEYS, letters, strict=True):
        if letter not in offered:
            choices = f"are {', '.join(offered)}" if offered else "are not in it; write them as '(A) …' and '(B) …'"
            raise DataError(f"{place}: {key!r} is {letter!r}, and the question's choices {choices}.")


def _warn_of_letters(questions: Sequence[ABQuestion]) -> None:
    """Warns where the letter alone tells the sides apart."""
    first = questions[0].matching
    if len(questions) > 1 and all(question.matching == first for question in questions):
        warn(
            f"The answer that shows the behaviour is {first!r} in all {len(questions)} questions, so what is read of "
            "the answers tells the letters apart as much as the behaviour; exchange the choices of half of them."
        )
