"""Findings: results in sentences and a table, and sections of several of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from steerlab.core.errors import InputError
from steerlab.experiment._blocks import Block, Folded, Paragraph, Section, Subsection, Verdict
from steerlab.experiment._blocks.tables import table_of

LONG_TABLE = 15


@dataclass(frozen=True)
class Finding:
    """A result in sentences and a table.

    Attributes:
        sentences: what was found.
        frame: its rows; None if the sentences are all.
        passed: whether a check held; None if nothing was checked.
        place: file in the run directory that holds all rows.
        caption: what the table shows.
        max_rows: rows shown at most.
    """

    sentences: Sequence[str] = ()
    frame: pd.DataFrame | None = field(default=None, repr=False)
    passed: bool | None = None
    place: str = ""
    caption: str = "Table"
    max_rows: int = 60

    def __post_init__(self) -> None:
        if isinstance(self.sentences, str):
            raise InputError("Finding takes a sequence of sentences, got one string; put it in a list.")


def finding_blocks(finding: Finding) -> list[Block]:
    """A finding's judgement, sentences and table; long tables are folded."""
    blocks: list[Block] = []
    if finding.passed is not None:
        word, tone = ("passed", "good") if finding.passed else ("failed", "bad")
        blocks.append(Verdict(word, tone, finding.sentences))
    else:
        blocks += [Paragraph(sentence) for sentence in finding.sentences]
    if finding.frame is not None and len(finding.frame):
        table = table_of(finding.frame, finding.caption, place=finding.place, max_rows=finding.max_rows)
        blocks.append(table if len(table.rows) <= LONG_TABLE else Folded(finding.caption, [table]))
    return blocks


def numbered(title: str, parts: Sequence[Sequence[Block]], each: str = "") -> list[Section]:
    """One section of all parts; with several, each under a heading of its own, `each` (or the title) with a number."""
    if not parts:
        return []
    if len(parts) == 1:
        return [Section(title, parts[0])]
    return [Section(title, [Subsection(f"{each or title} {k}", part) for k, part in enumerate(parts, start=1)])]


def finding_sections(title: str, found: Sequence[Finding], each: str = "") -> list[Section]:
    """One section of all findings; see `numbered`."""
    return numbered(title, [finding_blocks(finding) for finding in found], each)


def frame_sections(
    title: str, frames: Sequence[Any], blocks: Callable[[Any, str], list[Block]], kind: str
) -> list[Section]:
    """One section of all frames of a kind.

    Args:
        title: heading.
        frames: the frames, in the order in which they were measured.
        blocks: makes the blocks of a frame from it and from the file that holds it.
        kind: of result; names the file.
    """
    return numbered(title, [blocks(frame, f"frames/{kind}-{k:03d}.parquet") for k, frame in enumerate(frames)])


def conditions(frame: pd.DataFrame) -> list[Block]:
    """Plan and policy, as far as the frame states them."""
    named = [(name, frame[name].iloc[0]) for name in ("plan", "policy") if name in frame.columns]
    return [Paragraph("; ".join(f"{name}: {value}" for name, value in named) + ".", quiet=True)] if named else []
