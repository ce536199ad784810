"""Headings of the troubleshooting page are messages that the package really gives."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
HEADING = re.compile(r"^### `(.*)`(?: \((.*)\))?$")
GAP = "…"


def headings() -> list[tuple[str, str | None]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    found = [HEADING.match(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    return [(match[1], match[2]) for match in found if match is not None]


OURS = [text for text, owner in headings() if owner in (None, "a warning")]


@cache
def templates() -> list[str]:
    """Every string in the package, with a gap for each value put in."""
    texts = []
    for path in sorted(Path(ROOT / "steerlab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(_part(part) for part in node.values))
    return texts


def _part(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else GAP


def says(template: str, heading: str) -> bool:
    """Whether the heading's words stand in the template in order; a gap of the heading may swallow anything."""
    pieces = [piece.strip() for piece in re.split(f"[{GAP}]", heading)]
    at = 0
    for piece in (piece for piece in pieces if len(piece) > 2):
        at = template.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


@pytest.mark.parametrize("heading", OURS)
def test_the_package_says_it(heading: str) -> None:
    assert max(len(piece) for piece in heading.split(GAP)) >= 8, "too little of the message to search for"
    assert any(says(template, heading) for template in templates())


def test_another_wording_is_noticed() -> None:
    assert not any(says(template, "The vLLM engine wants vLLM, which is not installed") for template in templates())
