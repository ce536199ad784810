"""Texts and data shipped with the package: the reference text behind `dose`, a neutral text, the vectors folder."""

from pathlib import Path

from steerlab.core.errors import DataError

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


def _read(name: str) -> str:
    path = _HERE / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"The shipped text {path} cannot be read: {error}. Reinstall steerlab.") from error
