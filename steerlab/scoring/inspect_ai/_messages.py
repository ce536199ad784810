"""From inspect's messages to a prompt."""

from collections.abc import Sequence
from typing import Any

from steerlab.core._text import PromptLike
from steerlab.core.errors import InputError


def prompt_of(messages: Sequence[Any], *, chat: bool) -> PromptLike:
    """The prompt that messages make; a final message of the assistant's is gone on with.

    Raises:
        InputError: for content that is no text, calls of tools and their answers, or, without a chat, anything but one
            message of the user's.
    """
    turns = [{"role": message.role, "content": _text(message)} for message in messages]
    if chat:
        return turns
    if [turn["role"] for turn in turns] != ["user"]:
        roles = ", ".join(turn["role"] for turn in turns)
        raise InputError(f"Without a chat template (chat=False) a request is one message of the user's; got {roles}.")
    return turns[0]["content"]


def _text(message: Any) -> str:
    if message.role == "tool" or getattr(message, "tool_calls", None):
        raise InputError("An engine answers in text: it neither calls tools nor reads what they gave.")
    parts = [] if isinstance(message.content, str) else message.content
    other = sorted({part.type for part in parts} - {"text"})
    if other:
        advice = "; --reasoning-history none leaves earlier reasoning out" if other == ["reasoning"] else ""
        raise InputError(f"An engine reads text, and a message of the {message.role}'s has {', '.join(other)}{advice}.")
    return message.text
