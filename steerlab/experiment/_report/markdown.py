"""A document as Markdown, with its pictures as files beside it."""

import re
from collections import Counter
from functools import singledispatch
from pathlib import Path

from steerlab.experiment._blocks import (
    Bullets,
    Completions,
    Document,
    Facts,
    Folded,
    KeyFigures,
    Paragraph,
    Plot,
    Plots,
    Subsection,
    Table,
    TokenText,
    Verdict,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~$&])")


def markdown(document: Document, folder: str) -> tuple[str, dict[str, bytes]]:
    """A document as Markdown.

    Args:
        document: what to write.
        folder: name of the folder for pictures, beside the text.

    Returns:
        The text, and the pictures by file name within that folder.
    """
    writer = _Writer(folder)
    facts = [f"- {name}: {escape(value)}" for name, value in document.facts]
    parts = [f"# {escape(document.title)}", f"**{escape(document.lead)}**", "\n".join(facts)]
    for section in document.sections:
        parts += [f"## {escape(section.title)}", *(writer.block(block) for block in section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n", writer.pictures


def escape(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    Examples:
        >>> print(escape("a_b * <c>"))
        a\_b \* \<c\>
    """
    return re.sub(r"\s*\n\s*", " ", _SPECIAL.sub(r"\\\1", text))


def fenced(text: str) -> str:
    """Text as it is, between fences longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


class _Writer:
    """Renders blocks and collects the pictures they name."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.pictures: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()

    def block(self, block: object) -> str:
        """One block; blocks that hold others are rendered with them."""
        if isinstance(block, Plots):
            return "\n\n".join(self._plot(plot) for plot in block.plots)
        if isinstance(block, Plot):
            return self._plot(block)
        if isinstance(block, Subsection | Folded):
            inner = (self.block(part) for part in block.blocks)
            return "\n\n".join([f"### {escape(block.title)}", *inner])
        return _text(block)

    def _plot(self, plot: Plot) -> str:
        self._counts[plot.name] += 1
        number = self._counts[plot.name]
        name = f"{plot.name}.svg" if number == 1 else f"{plot.name}-{number}.svg"
        self.pictures[name] = plot.svg
        return f"![{escape(plot.alt)}]({self._folder}/{name})\n\n*{escape(plot.caption)}*"


@singledispatch
def _text(block: object) -> str:
    raise TypeError(f"There is no Markdown for {type(block).__name__}.")


@_text.register
def _(block: Paragraph) -> str:
    return f"*{escape(block.text)}*" if block.quiet else escape(block.text)


@_text.register
def _(block: Bullets) -> str:
    return "\n".join(f"- {escape(item)}" for item in block.items)


@_text.register
def _(block: Verdict) -> str:
    reasons = "\n".join(f"- {escape(reason)}" for reason in block.reasons)
    return f"**{escape(block.word[:1].upper() + block.word[1:])}**\n\n{reasons}"


@_text.register
def _(block: KeyFigures) -> str:
    return "\n".join(f"- **{escape(value)}** {escape(meaning)}" for value, meaning in block.entries)


@_text.register
def _(block: Facts) -> str:
    return "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in block.entries)


@_text.register
def _(block: Table) -> str:
    head = "| " + " | ".join(escape(column) for column in block.columns) + " |"
    sides = [" --- |" if k == 0 or k in block.worded else " ---: |" for k in range(len(block.columns))]
    rule = "|" + "".join(sides)
    rows = ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in block.rows]
    note = f"\n\n*{escape(block.note)}*" if block.note else ""
    return f"{escape(block.caption)}:\n\n" + "\n".join([head, rule, *rows]) + note


@_text.register
def _(block: Completions) -> str:
    parts = [f"**{escape(block.prompt)} …**"]
    for dose, text in block.texts:
        parts += [f"At {escape(dose)}:", fenced(text)]
    return "\n\n".join(parts)


@_text.register
def _(block: TokenText) -> str:
    return fenced(block.text)


def picture_folder(path: Path) -> str:
    """Name of the folder that holds the pictures of a Markdown report."""
    return f"{path.stem}_files"
