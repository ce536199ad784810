"""What is shipped with the package: the reference text behind `dose`, a neutral text, pairs, targets, vectors."""

from pathlib import Path

from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.errors import DataError
from steerlab.core.targets import Targets

REFERENCE_SHA256 = "bad9d7e4433b545265f1c48dac76ae6f62ed27818068baaa4547b9b193a332cf"
"""SHA-256 of `reference_text()` in UTF-8. Another text would give other medians, hence other doses: never edit it."""

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parents[1]


def reference_text() -> str:
    """The text on which the median residual norm behind `dose` is measured.

    Ordinary English prose of several registers (description, instructions, dialogue, explanation, news, a letter),
    about 720 tokens for SmolLM2; paragraphs are separated by blank lines. `REFERENCE_SHA256` pins it.

    Returns:
        The text; lines end in a line feed on every system.

    Raises:
        DataError: if the installation lacks the file.
    """
    return _read("reference.txt")


def neutral_text() -> str:
    """A text without sentiment, to measure what a plan costs in perplexity.

    Of the same kind as `reference_text()` and disjoint from it, about 600 tokens for SmolLM2.

    Returns:
        The text; lines end in a line feed on every system.

    Raises:
        DataError: if the installation lacks the file.
    """
    return _read("neutral.txt")


def shipped_vectors() -> Path:
    """The folder with the shipped steering vectors, their contrast pairs and targets.

    Returns:
        `_vectors` inside the package where it was installed from a wheel, else `vectors` beside the package, as in a
        checkout of the repository.

    Raises:
        DataError: if neither folder is there.

    Examples:
        >>> (shipped_vectors() / "sentiment" / "pairs.jsonl").is_file()
        True
    """
    candidates = (_PACKAGE / "_vectors", _PACKAGE.parent / "vectors")
    for folder in candidates:
        if (folder / "sentiment" / "pairs.jsonl").is_file():
            return folder
    places = " and ".join(str(folder) for folder in candidates)
    raise DataError(f"The shipped vectors are missing: looked in {places}. Reinstall steerlab.")


def pairs(name: str = "sentiment", split: str | None = None) -> ContrastPairs:
    """The contrast pairs of a shipped vector.

    Args:
        name: `sentiment`, `formality`, `refusal` or `capitals`.
        split: `train` or `dev`; all by default.

    Raises:
        DataError: for another name or split.

    Examples:
        >>> pairs("sentiment", "dev")
        ContrastPairs(18 pairs in 3 groups, a6166e12969189da)
    """
    return ContrastPairs.from_jsonl(_of_vector(name, "pairs.jsonl"), group="group", split=split)


def targets(name: str = "sentiment", split: str | None = None) -> Targets:
    """The targets of a shipped vector, on items that its pairs do not have.

    Args:
        name: as in `pairs`.
        split: `dev` or `test`; all by default.

    Raises:
        DataError: for another name or split.
    """
    return Targets.from_jsonl(_of_vector(name, "targets.jsonl"), split=split)


def _of_vector(name: str, file: str) -> Path:
    path = shipped_vectors() / str(name) / file
    if not path.is_file():
        names = sorted(found.parent.name for found in shipped_vectors().glob("*/pairs.jsonl"))
        raise DataError(f"There is no shipped vector {name!r}; there are {', '.join(names)}.")
    return path


def _read(name: str) -> str:
    path = _HERE / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"The shipped text {path} cannot be read: {error}. Reinstall steerlab.") from error
