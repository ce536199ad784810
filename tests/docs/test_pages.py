"""What pages refer to exists: files that the README links to, and options of the command line."""

import re

import pytest
from typer.main import get_command

from steerlab._cli.app import app
from tests.docs.pages import ROOT

COMMANDS = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
SECTIONS = dict(
    (section.split("\n", 1)[0].strip(), section)
    for section in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").split("\n## ")[1:]
)


def test_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_every_command_has_its_section() -> None:
    assert [name for name in COMMANDS if name not in SECTIONS] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_options_named_in_a_section_exist(name: str) -> None:
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", SECTIONS[name])) - {"--help"}
    assert named - known == set()
