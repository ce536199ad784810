"""What generated texts look like: repetition, diversity, length, and what a judge says of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd

from steerlab.core._files import warn_of_file_name
from steerlab.core._text import PromptLike, as_prompts
from steerlab.core.errors import DataError, InputError, PromptError, RewardError
from steerlab.core.shipped import neutral_text
from steerlab.measures.texts import distinct_n, repeated_share

Judge = Callable[[str, str], "float | Mapping[str, float]"]
"""From (prompt, text) to a number, or to several by name."""

REPETITION_N = 4
DISTINCT = (1, 2, 3)


def neutral_texts(texts: Sequence[PromptLike] | None) -> list[PromptLike]:
    """The texts given; paragraphs of shipped neutral prose if None.

    Raises:
        PromptError: if there is none, or something else than texts.
    """
    if texts is None:
        return [paragraph for paragraph in neutral_text().split("\n\n") if paragraph.strip()]
    if isinstance(texts, list | tuple) and not texts:
        raise PromptError("There are no neutral texts; pass at least one, or None for those of the package.")
    if isinstance(texts, Path):
        raise PromptError("Neutral texts are a list of strings; read the file: path.read_text().split('\\n\\n').")
    warn_of_file_name(texts, "its paragraphs, pathlib.Path({name}).read_text().split('\\n\\n')")
    return as_prompts(texts)


def content_ids(rows: pd.DataFrame) -> list[list[int]]:
    """The token ids of each completion, without an EOS that ended it.

    Raises:
        DataError: for a frame without `token_ids` and `finish_reason`.
    """
    _require(rows, ["token_ids", "finish_reason"])
    return [
        [int(token) for token in (ids[:-1] if reason == "eos" else ids)]
        for ids, reason in zip(rows.token_ids, rows.finish_reason, strict=True)
    ]


def with_repetition(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `repetition`: the share of a completion's 4-grams of tokens that it repeats.

    NaN for completions of fewer than four tokens.
    """
    return rows.assign(repetition=[repeated_share(ids, REPETITION_N) for ids in content_ids(rows)])


def text_statistics(rows: pd.DataFrame) -> pd.DataFrame:
    """Figures of the completions at each dose, on token ids without the closing EOS.

    Args:
        rows: a row per completion with `dose`, `token_ids`, `num_tokens`, `finish_reason`, as `generate_paired` makes.

    Returns:
        A row per dose: `dose`, `num_completions`, `repetition` (mean share of repeated 4-grams, over completions of at
        least four tokens), `repetition_count` (how many those are), `distinct_1`, `distinct_2`, `distinct_3` (of all
        completions of the dose together), `mean_tokens` (EOS counted), `finished` (share that ended by EOS).

    Raises:
        DataError: for a frame without these columns, or without rows.
    """
    _require(rows, ["dose", "token_ids", "num_tokens", "finish_reason"])
    if rows.empty:
        raise DataError("There are no completions to describe; generate some first.")
    figures = [_figures(float(dose), part) for dose, part in with_repetition(rows).groupby("dose")]  # pyright: ignore[reportArgumentType]
    return pd.DataFrame(figures)


def _figures(dose: float, part: pd.DataFrame) -> dict[str, Any]:
    ids = content_ids(part)
    return {
        "dose": dose,
        "num_completions": len(part),
        "repetition": float(part.repetition.mean()),
        "repetition_count": int(part.repetition.notna().sum()),
        **{f"distinct_{n}": distinct_n(ids, n) for n in DISTINCT},
        "mean_tokens": float(part.num_tokens.mean()),
        "finished": float((part.finish_reason == "eos").mean()),
    }


def judged(rows: pd.DataFrame, judge: Judge, *, allow_nan: bool = False) -> pd.DataFrame:
    """The rows with what a judge says of each completion.

    Args:
        rows: a row per completion with `prompt` and `text`.
        judge: from (prompt, text) to a number, or to a dictionary of numbers with the same names every time.
        allow_nan: keep NaN as "no answer"; otherwise it is an error.

    Returns:
        The rows with a column `judge`, or one `judge_<name>` per name.

    Raises:
        RewardError: if the judge fails or gives something else than numbers; names the row.
        DataError: for a frame without these columns.

    Examples:
        >>> rows = pd.DataFrame({"prompt": ["Say hi"], "text": ["hi there"]})
        >>> judged(rows, lambda prompt, text: len(text)).judge.tolist()
        [8.0]
    """
    if not callable(judge):
        raise InputError(f"A judge is a function of (prompt, text), got {type(judge).__name__}.")
    _require(rows, ["prompt", "text"])
    given = [_opinion(judge, place, row, allow_nan) for place, row in enumerate(rows.to_dict("records"))]
    names = list(given[0]) if given else []
    for place, row in enumerate(given):
        if list(row) != names:
            raise RewardError(
                f"The judge gave {list(row)} for row {place} and {names} for row 0; names must not change."
            )
    return rows.assign(**{name: [row[name] for row in given] for name in names})


def _opinion(judge: Judge, place: int, row: dict[Any, Any], allow_nan: bool) -> dict[str, float]:
    where = f"row {place} (prompt {row['prompt']!r:.60}, text {row['text']!r:.80})"
    try:
        given = judge(row["prompt"], row["text"])
    except Exception as error:
        raise RewardError(f"The judge failed on {where}: {type(error).__name__}: {error}") from error
    named = (
        {f"judge_{name}": value for name, value in given.items()} if isinstance(given, Mapping) else {"judge": given}
    )
    for name, value in named.items():
        if not isinstance(value, Real):
            raise RewardError(f"The judge gave {name}={value!r:.60} for {where}; it must give a number.")
        if math.isinf(value) or (math.isnan(value) and not allow_nan):
            raise RewardError(f"The judge gave {name}={value} for {where}; allow_nan=True keeps NaN as no answer.")
    return {name: float(value) for name, value in named.items()}


def _require(rows: pd.DataFrame, columns: list[str]) -> None:
    missing = [name for name in columns if name not in rows.columns]
    if missing:
        raise DataError(f"The frame of completions lacks {missing}; it has {list(rows.columns)}.")
