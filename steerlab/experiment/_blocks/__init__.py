"""What a report is made of: sections of blocks, free of any format; other modules render them as HTML or Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paragraph:
    """Running text.

    Attributes:
        text: plain text.
        quiet: a remark rather than a finding.
    """

    text: str
    quiet: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Verdict:
    """A judgement with its reasons.

    Attributes:
        word: the judgement, e.g. `no effect`.
        tone: `good`, `neutral` or `bad`; says how it is marked.
        reasons: one sentence each.
    """

    word: str
    tone: str
    reasons: Sequence[str]


@dataclass(frozen=True)
class KeyFigures:
    """A few numbers that stand out: pairs of value and meaning."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table of formatted cells; the first column names the rows.

    Attributes:
        caption: what it shows.
        columns: headings.
        rows: cells as text.
        note: what was left out, and where it is; empty if nothing was.
        worded: indices of the columns that hold words rather than figures.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    worded: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plot:
    """A picture.

    Attributes:
        name: short, for file names.
        svg: the picture.
        alt: its finding in words.
        caption: how to read it.
    """

    name: str
    svg: bytes
    alt: str
    caption: str


@dataclass(frozen=True)
class Plots:
    """Pictures that stand beside each other where there is room."""

    plots: Sequence[Plot]


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for: pairs of name and value."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Completions:
    """Completions of a prompt at several doses.

    Attributes:
        prompt: the prompt.
        texts: pairs of dose and text.
    """

    prompt: str
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class TokenText:
    """A text whose tokens carry log-probs.

    Attributes:
        html: a fragment with colours and tooltips, safe to insert.
        text: the text itself.
    """

    html: str
    text: str


@dataclass(frozen=True)
class Folded:
    """Blocks that a reader opens when needed."""

    title: str
    blocks: Sequence["Block"]


@dataclass(frozen=True)
class Subsection:
    """Blocks under a heading of the second order."""

    title: str
    blocks: Sequence["Block"]


Block = (
    Paragraph
    | Bullets
    | Verdict
    | KeyFigures
    | Table
    | Plot
    | Plots
    | Facts
    | Completions
    | TokenText
    | Folded
    | Subsection
)


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; its identifier is made from the title and is unique in the report."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        title: its name.
        lead: what was found, in one sentence under it.
        sections: in order.
        facts: the title block: pairs of name and value.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = ()
