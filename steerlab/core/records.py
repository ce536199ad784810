"""Reading JSON-lines files row by row, with the line number in every complaint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steerlab.core.errors import DataError
from steerlab.core.text import PromptLike, TargetLike, is_prompt, is_target


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (`file:line`, row) for every non-blank line.

    Raises:
        DataError: if the file cannot be read, or a line is not a JSON object.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}: {error}.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place} is not valid JSON: {error.msg} at column {error.colno}.") from error
        if not isinstance(row, dict):
            raise DataError(f"{place} must be a JSON object, got {type(row).__name__}.")
        yield place, row


def field(row: dict[str, Any], key: str, place: str) -> Any:
    """The value of `key`.

    Raises:
        DataError: if it is missing, null or an empty string; names the keys that are there.
    """
    value = row.get(key)
    if value is None or value == "" or value == []:
        raise DataError(f"{place} has no {key!r}; its keys are {', '.join(sorted(row)) or 'none'}.")
    return value


def prompt_field(row: dict[str, Any], key: str, place: str) -> PromptLike:
    """The prompt at `key`.

    Raises:
        DataError: if it is missing, empty, or neither text, chat messages nor token ids.
    """
    value = field(row, key, place)
    if not is_prompt(value):
        raise DataError(f"{place}: {key!r} is neither text, nor chat messages, nor token ids: {value!r:.80}.")
    return value


def target_field(row: dict[str, Any], key: str, place: str) -> TargetLike:
    """The target at `key`.

    Raises:
        DataError: if it is missing, empty, or neither text nor token ids.
    """
    value = field(row, key, place)
    if not is_target(value):
        raise DataError(f"{place}: {key!r} is neither text nor token ids: {value!r:.80}.")
    return value
