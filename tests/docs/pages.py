"""Python blocks of the documentation, and what a page says about those that the tests do not run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\s*$")
_NOT_RUN = re.compile(r"^<!-- not run: (.*) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block of Python.

    Attributes:
        page: the page it stands on.
        line: the line of its first statement, from 1.
        text: the code.
        not_run: why the tests leave it out; None if they run it.
    """

    page: Path
    line: int
    text: str
    not_run: str | None

    @property
    def source(self) -> str:
        """The code, moved down so that a traceback names the page's own lines."""
        return "\n" * (self.line - 1) + self.text


def all_pages() -> list[Path]:
    """The README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The page's Python blocks, in order.

    A line `<!-- not run: reason -->` before a block, with at most blank lines between, leaves it out.
    """
    reason: str | None = None
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for _, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            marked = _NOT_RUN.match(line.strip())
            reason = marked[1].strip() if marked else (reason if not line.strip() else None)
            continue
        body = []
        start = 0
        for number, inner in lines:
            start = start or number
            if _FENCE.match(inner):
                break
            body.append(inner)
        if fence[1] == "python":
            yield Block(page, start, "\n".join(body) + "\n", reason)
        reason = None
