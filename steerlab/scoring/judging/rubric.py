"""What a judge is asked: rubrics with places for the texts, and the scale of the answers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from steerlab.core._characters import check_whole
from steerlab.core._hashing import content_hash
from steerlab.core._numbers import as_list, as_number, plain, shown
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError
from steerlab.measures.ratings import AGGREGATES

_PLACE = re.compile(r"\{(prompt|text|a|b)\}")
RATED: Final = ("text",)
COMPARED: Final = ("a", "b")


@dataclass(frozen=True)
class JudgeCard:
    """Everything that a judgement depends on besides the texts.

    Attributes:
        model: name of the judge's model.
        weights_hash: of that model.
        backend: what ran it.
        dtype: of weights and activations.
        rubrics: the text of each rubric by its name; in a place such as `{text}` stands what is judged.
        labels: the answers, in the order of the scale.
        values: what each label counts.
        aggregate: how ratings of several rubrics become one, by name.
        chat: whether the filled rubric is a user's turn of a chat.
        lead: what stands between the rubric and the label, usually a space or nothing.
    """

    model: str
    weights_hash: str
    backend: str
    dtype: str
    rubrics: Mapping[str, str]
    labels: tuple[str, ...]
    values: tuple[float, ...]
    aggregate: str
    chat: bool
    lead: str | None

    @cached_property
    def hash(self) -> str:
        """Content hash of all of it; the model counts by its weights, not by its name."""
        return content_hash({name: value for name, value in asdict(self).items() if name != "model"})

    @cached_property
    def rubric_hash(self) -> str:
        """Content hash of rubrics and scale, whichever model reads them."""
        return content_hash([dict(self.rubrics), self.labels, self.values, self.aggregate])

    def facts(self) -> list[tuple[str, Any]]:
        """Names and what they stand for, for a reader."""
        scale = ", ".join(f"{label} = {value:g}" for label, value in zip(self.labels, self.values, strict=True))
        several = [("aggregate", self.aggregate)] if len(self.rubrics) > 1 else []
        return [
            ("judge", f"{self.model} ({self.backend}, {self.dtype})"),
            ("weights", self.weights_hash),
            *[(f"rubric {name}", text) for name, text in self.rubrics.items()],
            ("scale", scale),
            *several,
            ("asked", "as a turn of a chat" if self.chat else "as plain text"),
            ("rubric hash", self.rubric_hash),
            ("judge hash", self.hash),
        ]

    @property
    def targets(self) -> list[str]:
        """What is scored after a rubric, one per label."""
        return [f"{self.lead or ''}{label}" for label in self.labels]


def card_of(
    info: ModelInfo,
    backend: str,
    rubric: str | Mapping[str, str],
    scale: Sequence[str] | Mapping[str, float],
    *,
    aggregate: str,
    chat: bool,
    lead: str | None,
) -> JudgeCard:
    """The card of a judge, its arguments checked.

    Raises:
        InputError: for what cannot be used; says what to write instead.
    """
    labels, values = scale_of(scale)
    rubrics = rubrics_of(rubric)
    if aggregate not in AGGREGATES:
        raise InputError(f"aggregate is one of {', '.join(AGGREGATES)}, got {shown(aggregate)}.")
    if aggregate == "harmonic_mean" and len(rubrics) > 1 and min(values) < 0:
        raise InputError(f"A harmonic mean takes no negative rating; the scale has {min(values):g}. Use 'mean'.")
    if lead is None:
        ends = chat or any(text[-1:].isspace() for text in rubrics.values())
        lead = "" if ends else " "
    if not isinstance(lead, str):
        raise InputError(f"lead is the text between rubric and label, e.g. ' ' or '', got {shown(lead)}.")
    same = (info.name, info.weights_hash, backend, info.dtype)
    return JudgeCard(*same, rubrics, labels, values, aggregate, chat, lead)


def filled(template: str, texts: Mapping[str, str]) -> str:
    """A rubric with its places filled; braces of other words, and those inside the texts, stay.

    Examples:
        >>> filled('Rate {text} as {"rating": 1}', {"text": "{text}"})
        'Rate {text} as {"rating": 1}'
    """
    return _PLACE.sub(lambda found: texts.get(found[1], found[0]), template)


def check_places(rubrics: Mapping[str, str], needed: Sequence[str], prompts: Any) -> None:
    """Checks that every rubric has the places that a call fills.

    Raises:
        InputError: if one lacks a place, or asks for a prompt that was not given.
    """
    for name, text in rubrics.items():
        has = set(_PLACE.findall(text))
        missing = [f"{{{place}}}" for place in needed if place not in has]
        if missing:
            for_what = "to rate texts" if needed == RATED else "to compare pairs"
            raise InputError(f"The rubric {name!r} has no place {' and '.join(missing)}, needed {for_what}.")
        if "prompt" in has and prompts is None:
            raise InputError(f"The rubric {name!r} has a place {{prompt}}; pass prompts=, one per text.")


def texts_of(texts: Any, name: str, n: int | None = None) -> list[str]:
    """Texts as a list; one for every other text where their number is given.

    Raises:
        InputError: for something else.
    """
    found = None if isinstance(texts, str) else as_list(texts, ordered=True)
    if not found or not all(isinstance(text, str) for text in found):
        raise InputError(f"{name} is a list of strings, at least one; got {shown(texts)}.")
    if n is not None and len(found) != n:
        raise InputError(f"There are {n} texts and {len(found)} {name}; pass one for each.")
    for index, text in enumerate(found):
        check_whole(text, f"{name} {index}", InputError)
    return found


def rubrics_of(rubric: Any) -> dict[str, str]:
    """Rubrics by name; a single one is called `rubric`.

    Raises:
        InputError: for no rubric, or one without a place.
    """
    named = rubric if isinstance(rubric, Mapping) else {"rubric": rubric}
    if not named:
        raise InputError("There is no rubric; pass a text, or several by name.")
    for name, text in named.items():
        if not isinstance(name, str) or not isinstance(text, str) or not text.strip():
            raise InputError(f"A rubric is a text with a place {{text}} (or {{a}} and {{b}}), got {shown(text)}.")
        check_whole(text, f"The rubric {name!r}", InputError)
        if not _PLACE.search(text):
            raise InputError(f"The rubric {name!r} has no place for what is judged: {{text}}, or {{a}} and {{b}}.")
    return dict(named)


def scale_of(scale: Any) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Labels of a scale and what each counts.

    Raises:
        InputError: for fewer than two labels, two that are alike, or one that counts nothing.
    """
    labels = list(scale) if isinstance(scale, Mapping) else as_list(scale, ordered=True)
    if isinstance(scale, str) or labels is None or len(labels) < 2:
        raise InputError(f"scale is two or more labels, e.g. ('0', '1', '2'), got {shown(scale)}.")
    if not all(isinstance(label, str) for label in labels):
        texts = tuple(label if isinstance(label, str) else str(plain(label)) for label in labels)
        raise InputError(f"The labels of a scale are texts, as the judge writes them: {texts}, not {shown(labels)}.")
    if not all(label.strip() for label in labels) or len(set(labels)) < len(labels):
        raise InputError(f"The labels of a scale are distinct texts, got {shown(labels)}.")
    given = [scale[label] for label in labels] if isinstance(scale, Mapping) else [_number(label) for label in labels]
    values = [as_number(value) for value in given]
    if any(value is None for value in values):
        raise InputError(
            f"The labels {shown(labels)} are no numbers; say what each counts: scale={{'bad': 0, 'good': 1}}."
        )
    return tuple(labels), tuple(float(value) for value in values if value is not None)


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None
