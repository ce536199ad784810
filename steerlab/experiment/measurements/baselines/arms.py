"""Arms that change the prompt instead of the model: instructions of graded wording, and examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steerlab.core._characters import check_whole
from steerlab.core._numbers import as_integer, as_list, as_number, shown
from steerlab.core._text import PromptLike
from steerlab.core.errors import InputError


@dataclass(frozen=True)
class PromptArm:
    """Text before every prompt, at several strengths.

    Attributes:
        name: what reports call it.
        strengths: ascending, all above 0; at strength 0 stands nothing.
        texts: what stands before the prompt at each strength.
        separator: between that and the prompt.
    """

    name: str
    strengths: tuple[float, ...]
    texts: tuple[str, ...]
    separator: str = "\n\n"

    def before(self, strength: float) -> str:
        """What stands before a prompt at a strength, separator included."""
        return self.texts[self.strengths.index(strength)] + self.separator

    def applied(self, prompt: PromptLike, strength: float) -> PromptLike:
        """A prompt with the arm's text before it; in a chat, in the system's message.

        Raises:
            InputError: for a prompt of token ids, which has no text to put anything before.
        """
        if isinstance(prompt, str):
            return self.before(strength) + prompt
        messages: list[Any] = list(prompt)
        if not all(isinstance(message, Mapping) for message in messages):
            raise InputError(f"A {self.name} arm takes prompts as text or chat messages; one is token ids.")
        text = self.texts[self.strengths.index(strength)]
        if messages and messages[0].get("role") == "system":
            first = {**messages[0], "content": text + self.separator + messages[0]["content"]}
            return [first, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def prompting(
    wordings: Mapping[float, str] | Sequence[str], *, name: str = "prompting", separator: str = "\n\n"
) -> PromptArm:
    r"""An arm that asks for what the vector is to do: an instruction before every prompt, stronger and stronger.

    Args:
        wordings: the instruction at each strength above 0; a list has the strengths 1, 2, ….
        name: what reports call it.
        separator: between instruction and prompt.

    Raises:
        InputError: for no wording, one that is no text, or a strength that is not above 0.

    Examples:
        >>> arm = sl.prompting(["Be kind.", "Be as kind as you can."])
        >>> arm.applied("The film was", 2)
        'Be as kind as you can.\n\nThe film was'
    """
    named = _numbered(wordings)
    return _arm(name, named, separator)


def few_shot(
    examples: Sequence[str],
    numbers: Sequence[int] | None = None,
    *,
    name: str = "few-shot",
    separator: str = "\n\n",
) -> PromptArm:
    r"""An arm that shows what the vector is to do: examples before every prompt, more and more of them.

    Args:
        examples: texts that show the property, in the order in which they stand.
        numbers: how many of them, per strength; by default 1, 2, 4, … and all.
        name: what reports call it.
        separator: between examples, and between the last and the prompt.

    Raises:
        InputError: for no example, or a number of them that are not there.

    Examples:
        >>> arm = sl.few_shot(["I loved it.", "It was wonderful.", "Superb!"])
        >>> arm.strengths
        (1.0, 2.0, 3.0)
        >>> arm.applied("The film was", 2)
        'I loved it.\n\nIt was wonderful.\n\nThe film was'
    """
    found = as_list(examples, ordered=True)
    if not found or not all(isinstance(example, str) and example.strip() for example in found):
        raise InputError(f"examples is a list of texts, at least one; got {shown(examples)}.")
    doubled = [2**k for k in range(len(found).bit_length()) if 2**k < len(found)]
    wanted = as_list([*doubled, len(found)] if numbers is None else numbers) or []
    counts = [as_integer(number) for number in wanted]
    if not counts or any(count is None or not 1 <= count <= len(found) for count in counts):
        raise InputError(f"numbers are from 1 to {len(found)}, the examples there are; got {shown(numbers)}.")
    return _arm(name, {float(count): separator.join(found[:count]) for count in counts if count}, separator)


def _numbered(wordings: Any) -> dict[float, str]:
    if isinstance(wordings, Mapping):
        strengths = {as_number(strength): text for strength, text in wordings.items()}
    else:
        strengths = {float(k): text for k, text in enumerate(as_list(wordings, ordered=True) or (), start=1)}
    if not strengths or any(strength is None or strength <= 0 for strength in strengths):
        raise InputError(
            f"wordings are texts by strength, all above 0, or a list of texts; got {shown(wordings)}. At strength 0 "
            "stands nothing, which is measured anyway."
        )
    return {strength: text for strength, text in strengths.items() if strength is not None}


def _arm(name: Any, texts: Mapping[float, str], separator: Any) -> PromptArm:
    if not isinstance(name, str) or not name.strip() or name == "vector":
        raise InputError(f"name is a text other than 'vector', got {shown(name)}.")
    if not isinstance(separator, str):
        raise InputError(f"separator is a text, got {shown(separator)}.")
    for strength, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"At strength {strength:g} the {name} arm has no text: {shown(text)}.")
        check_whole(text, f"The text at strength {strength:g}", InputError)
    ordered = sorted(texts)
    return PromptArm(name, tuple(ordered), tuple(texts[strength] for strength in ordered), separator)


def check_arms(arms: Any) -> list[PromptArm]:
    """Arms as a list, each with a name of its own.

    Raises:
        InputError: for something else.
    """
    found = [arms] if isinstance(arms, PromptArm) else as_list(arms, ordered=True)
    if not found or not all(isinstance(arm, PromptArm) for arm in found):
        raise InputError(f"arms are made by sl.prompting(…) and sl.few_shot(…), at least one; got {shown(arms)}.")
    names = [arm.name for arm in found]
    if len(set(names)) < len(names):
        raise InputError(f"Each arm has a name of its own, got {names}; pass name=.")
    return found
