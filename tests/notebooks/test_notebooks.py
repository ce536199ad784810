"""Every notebook reads as a tutorial. `make docs` runs them, from the first cell to the last."""

import ast
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


@dataclass(frozen=True)
class Cell:
    """One cell of a percent-format file."""

    markdown: bool
    source: str


def cells(path: Path) -> list[Cell]:
    """The cells of a notebook, without the file's header."""
    _, *parts = path.read_text(encoding="utf-8").split("\n# %%")
    return [Cell(part.startswith(" [markdown]"), part.partition("\n")[2].strip()) for part in parts]


def test_the_tutorials_are_there():
    assert {path.stem for path in NOTEBOOKS} == {
        "first_steps",
        "choosing_layer_and_dose",
        "exact_probabilities_and_entropy",
        "steering_at_scale_with_vllm",
        "sequences_and_entropy_gradients",
        "an_honest_null",
        "a_study_of_your_own",
        "token_views",
        "gallery",
        "entropy_probe",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_reads_as_a_tutorial(path: Path):
    found = cells(path)
    assert "formats: ipynb,py:percent" in path.read_text(encoding="utf-8")
    assert found[0].source.startswith("# # ")
    assert found[-1].markdown
    assert "# ## Exercises" in found[-1].source
    for before, cell in itertools.pairwise(found):
        assert cell.markdown or before.markdown, f"no words before the cell\n{cell.source[:200]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_claims_can_fail(path: Path):
    """Every notebook checks what it says about its numbers."""
    checked = [cell for cell in cells(path) if not cell.markdown and "assert " in cell.source]
    assert len(checked) >= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_results_are_shown_not_printed(path: Path):
    source = "\n".join(cell.source for cell in cells(path) if not cell.markdown)
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert "print" not in [func.id for func in calls if isinstance(func, ast.Name)]
    assert any(isinstance(ast.parse(cell.source).body[-1], ast.Expr) for cell in cells(path) if not cell.markdown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_says_how_long_it_takes(path: Path):
    """`scripts/run_notebooks.py`, which `make docs` calls, fails if a notebook takes more than twice as long."""
    said = re.search(r"about (\d+)\s+seconds", re.sub(r"\n# ", " ", cells(path)[0].source))
    assert said is not None
    assert int(said[1]) <= 180


def test_a_study_takes_forty_lines():
    found = [cell.source for cell in cells(FOLDER / "a_study_of_your_own.py") if not cell.markdown]
    assert len([line for source in found for line in source.splitlines() if line.strip()]) <= 40
