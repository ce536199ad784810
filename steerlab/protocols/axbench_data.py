"""Concepts of AxBench: texts that show a concept, and texts that do not, from the benchmark's own files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steerlab.core._hashing import content_hash
from steerlab.core._numbers import check_integer
from steerlab.core.errors import DataError

COLUMNS: Final = ("input", "output", "output_concept", "concept_genre", "category", "concept_id")


@dataclass(frozen=True)
class Concept:
    """A concept with pairs of (instruction, response).

    Attributes:
        name: the concept in words.
        positives: responses that show it.
        negatives: responses that do not.

    Raises:
        DataError: if a side is empty, or holds something else.

    Examples:
        >>> Concept("rain", (("How are you?", "Wet."),), (("How are you?", "Well."),)).name
        'rain'
    """

    name: str
    positives: tuple[tuple[str, str], ...]
    negatives: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise DataError(f"A concept has a name in words, got {self.name!r:.60}.")
        for side in ("positives", "negatives"):
            pairs = getattr(self, side)
            good = all(len(pair) == 2 and all(isinstance(text, str) and text for text in pair) for pair in pairs)
            if not pairs or not good:
                raise DataError(
                    f"{side} of the concept {self.name!r:.60} are pairs of instruction and response, at least one."
                )

    @property
    def hash(self) -> str:
        """Content hash."""
        return content_hash([self.name, self.positives, self.negatives])

    def records(self) -> list[dict[str, Any]]:
        """The texts that show it as records of prompt and wanted completion, for methods that learn."""
        pairs = dict.fromkeys(self.positives)
        return [{"prompt": instruction, "target": f"\n{response}"} for instruction, response in pairs]


def read_concepts(
    path: str | Path, *, limit: int | None = None, texts: int | None = None, named: Sequence[str] | None = None
) -> list[Concept]:
    """The concepts of a training file of AxBench (`train_data.parquet`).

    A concept's negatives are the file's shared ones (category `negative`, concept −1) of the same genre, as in the
    benchmark.

    Args:
        path: the file, with the columns input, output, output_concept, concept_genre, category and concept_id.
        limit: only the first concepts.
        texts: only the first texts of each side.
        named: only concepts of these names.

    Raises:
        DataError: for another file, or if it holds no such concept.
    """
    rows = _rows(path)
    shared = rows[(rows.category == "negative") & (rows.concept_id < 0)]
    found = []
    for _, part in rows[rows.category == "positive"].groupby("concept_id", sort=True):
        name, genre = part.output_concept.iloc[0], part.concept_genre.iloc[0]
        others = shared[shared.concept_genre == genre]
        if named is None or name in named:
            found.append(Concept(name, _pairs(part, texts), _pairs(others, texts)))
    found = found[: None if limit is None else check_integer(limit, "limit", least=1)]
    if not found:
        raise DataError(f"{path} holds no concept{'' if named is None else f' named {list(named)}'}.")
    return found


def read_instructions(path: str | Path, *, limit: int = 10) -> list[str]:
    """Instructions without a concept: those of the negative rows of an AxBench file, each once.

    The benchmark takes ten of AlpacaEval per concept; its files hold others of the same kind.

    Args:
        path: a file as `read_concepts` takes.
        limit: how many.

    Raises:
        DataError: for another file, or if it has fewer.
    """
    rows, n = _rows(path), check_integer(limit, "limit", least=2)
    found = list(dict.fromkeys(rows[rows.category == "negative"].input.str.strip()))
    if len(found) < n:
        raise DataError(f"{path} holds {len(found)} instructions without a concept; {n} are wanted.")
    return found[:n]


def _pairs(rows: Any, limit: int | None) -> tuple[tuple[str, str], ...]:
    n = None if limit is None else check_integer(limit, "texts", least=1)
    return tuple(rows[["input", "output"]].itertuples(index=False, name=None))[:n]


def _rows(path: str | Path) -> Any:
    import pandas as pd

    try:
        rows = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a parquet file of AxBench: {error!s:.120}.") from error
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise DataError(f"{path} lacks the columns {', '.join(missing)}; is it a file of AxBench?")
    return rows
