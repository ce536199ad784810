"""Reading rows from JSON (lines or an array), CSV, frames and lists, with file and line or row in every error."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from steerlab.core._characters import check_whole
from steerlab.core._files import read_text
from steerlab.core._text import PromptLike, TargetLike, is_prompt, is_target, plain_text
from steerlab.core.errors import DataError

# Where a row stands, for error messages (`pairs.csv:3`), and the row.
PlacedRow: TypeAlias = tuple[str, dict[str, Any]]

_HEAD = 1 << 10  # characters in which a file's first sign stands
_BLANK = re.compile(r"[ \t\n\r]*")
_LONE_RETURN = re.compile(r"\r(?!\n)")
_RETURN = "\U000f000d"  # stands for it while csv reads: a code that no text uses


def read_jsonl(path: str | Path) -> Iterator[PlacedRow]:
    """Yields (`file:line`, row) for every non-blank line, or for every element of one JSON array that the file holds.

    Raises:
        DataError: if the file cannot be read, or a line or element is not a JSON object, or holds half a character.
    """
    text = read_text(path)
    read = _elements if text[:_HEAD].lstrip()[:1] == "[" else _lines
    for place, row in read(path, text):
        if not isinstance(row, dict):
            raise DataError(f"{place} must be a JSON object, got {type(row).__name__}.")
        check_whole(row, place, DataError)
        yield place, row


def _lines(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with _reading(path, number, number):
                row = json.loads(line)
            yield f"{path}:{number}", row


def _elements(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    """The elements of the one array that a text holds."""
    decode, number, at = json.JSONDecoder().raw_decode, 1, 0

    def skip(start: int) -> int:
        nonlocal number
        stop = _BLANK.match(text, start).end()  # pyright: ignore[reportOptionalMemberAccess]
        number += text.count("\n", start, stop)
        return stop

    at = skip(skip(0) + 1)
    while text[at : at + 1] != "]":
        start = number
        with _reading(path, start, 1):
            row, end = decode(text, at)
        number += text.count("\n", at, end)
        yield f"{path}:{start}", row
        at = skip(end)
        if text[at : at + 1] not in (",", "]"):
            raise DataError(f"{path}:{number} is not valid JSON: a comma or the array's end is missing.")
        if text[at] == ",":
            at = skip(at + 1)
    rest = skip(at + 1)
    if rest < len(text):
        raise DataError(f"{path}:{number} stands after the end of the file's JSON array; keep one array a file.")


@contextmanager
def _reading(path: str | Path, line: int, first_line: int) -> Iterator[None]:
    """Turns errors in a row into errors that name its line; the parsed text begins at `first_line`."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{first_line + error.lineno - 1} is not valid JSON: {error.msg} at column {error.colno}."
        ) from error
    except RecursionError as error:
        raise DataError(f"{path}:{line} is not a row: its JSON is nested too deeply.") from error
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{path}:{line} is not a row: {error}.") from error


def read_csv(path: str | Path) -> Iterator[PlacedRow]:
    """Yields (`file:line`, row) for every row below the header; the line is the one a row starts on.

    Every value is text, exactly as it stands in its cell; an empty cell is an empty string.

    Raises:
        DataError: if the file cannot be read, has no header, or a row has more or fewer cells than it.
    """
    text = _LONE_RETURN.sub(_RETURN, read_text(path))  # csv ends a row at it
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline="\n"), strict=True)
    header = _header(path, _next_cells(path, reader))
    line = reader.line_num + 1
    while (cells := _next_cells(path, reader)) is not None:
        if cells and len(cells) != len(header):
            raise DataError(f"{path}:{line} has {len(cells)} cells, the header has {len(header)}.")
        if cells:
            yield f"{path}:{line}", dict(zip(header, cells, strict=True))
        line = reader.line_num + 1


def frame_rows(frame: Any) -> Iterator[PlacedRow]:
    """Yields (`row i`, row) for every row of a pandas or polars frame, i counted from 0.

    Missing values (NaN, NA, null) become None, NumPy values plain Python ones.

    Raises:
        DataError: if it is neither kind of frame, or has a column name twice.
    """
    if not hasattr(frame, "columns") or not (hasattr(frame, "to_dicts") or hasattr(frame, "to_dict")):
        raise DataError(f"from_frame takes a pandas or polars frame, got {type(frame).__name__}.")
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise DataError(f"The frame has a column name twice: {names}.")
    rows = frame.to_dicts() if hasattr(frame, "to_dicts") else frame.to_dict(orient="records")
    for index, row in enumerate(rows):
        plain = {str(key): _plain(value) for key, value in row.items()}
        check_whole(plain, f"row {index}", DataError)
        yield f"row {index}", plain


def placed_records(records: Iterable[Mapping[str, Any]]) -> Iterator[PlacedRow]:
    """Yields (`record i`, row) for every mapping of a list, i counted from 0; missing values are as in `frame_rows`.

    Raises:
        DataError: if it is no list of mappings.
    """
    if hasattr(records, "columns"):
        raise DataError(f"Records come as a list of dictionaries, got {type(records).__name__}; from_frame reads it.")
    if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
        raise DataError(f"Records come as a list of dictionaries, got {type(records).__name__}.")
    for index, row in enumerate(records):
        if not isinstance(row, Mapping):
            raise DataError(f"record {index} is a {type(row).__name__}; each record is a dictionary.")
        plain = {key: _plain(value) for key, value in row.items()}
        check_whole(plain, f"record {index}", DataError)
        yield f"record {index}", plain


def of_split(rows: Iterable[PlacedRow], split: str | None, source: object, what: str) -> list[PlacedRow]:
    """The rows whose `split` field equals `split`; None keeps all.

    Raises:
        DataError: if none is left.
    """
    kept, others = [], set()
    for place, row in rows:
        if split is None or row.get("split") == split:
            kept.append((place, row))
        elif row.get("split") is not None:
            others.add(str(row["split"]))
    if not kept:
        there = sorted(others)
        known = f"; its splits are {', '.join(there[:8])}{', …' if len(there) > 8 else ''}" if there else ""
        raise DataError(f"{source} holds no {what}" + ("" if split is None else f" with split {split!r}{known}") + ".")
    return kept


def field(row: dict[str, Any], key: str, place: str) -> Any:
    """The value of `key`.

    Raises:
        DataError: if it is missing, null or an empty string; names the keys that are there.
    """
    value = row.get(key)
    if key in row and (value is None or value == "" or value == []):
        raise DataError(f"{place}: {key!r} is empty; fill it in, or leave the record out.")
    if value is None:
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
    return plain_text(value)


def target_field(row: dict[str, Any], key: str, place: str) -> TargetLike:
    """The target at `key`.

    Raises:
        DataError: if it is missing, empty, or neither text nor token ids.
    """
    value = field(row, key, place)
    if not is_target(value):
        raise DataError(f"{place}: {key!r} is neither text nor token ids: {value!r:.80}.")
    return plain_text(value)


def _next_cells(path: str | Path, reader: Any) -> list[str] | None:
    line = reader.line_num + 1
    try:
        cells = next(reader, None)
        return cells and [cell.replace(_RETURN, "\r") for cell in cells]
    except csv.Error as error:
        raise DataError(f"{path}:{line} is not valid CSV: {error}.") from error


def _header(path: str | Path, cells: list[str] | None) -> list[str]:
    if not cells:
        raise DataError(f"{path} has no header; its first line names the columns.")
    if len(set(cells)) < len(cells):
        raise DataError(f"{path}:1 names a column twice: {', '.join(cells)}.")
    return cells


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays, tensors, series and their scalars
        value = value.tolist()
    if isinstance(value, str | list | dict):
        return value
    import pandas

    return None if pandas.api.types.is_scalar(value) and pandas.isna(value) else value
