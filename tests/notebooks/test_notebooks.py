"""Every notebook reads as a tutorial, and runs from its first cell to its last."""

import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
NEEDS_VLLM = {"steering_at_scale_with_vllm"}
JUPYTER = ("jupytext", "nbclient", "ipykernel")
TIMEOUT = 900
"""Seconds after which a notebook counts as hung; no bound on its speed."""


@dataclass(frozen=True)
class Cell:
    """One cell of a percent-format file."""

    markdown: bool
    source: str


def cells(path: Path) -> list[Cell]:
    """The cells of a notebook, without the file's header."""
    _, *parts = path.read_text(encoding="utf-8").split("\n# %%")
    return [Cell(part.startswith(" [markdown]"), part.partition("\n")[2].strip()) for part in parts]


def draws(source: str) -> bool:
    """Whether a cell's source makes a figure."""
    return "plt.show()" in source or "_ = plot_" in source or ".plot()" in source


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def of_each_notebook(path: Path) -> Any:
    """A test of one notebook that runs its cells, with the marks it needs."""
    marks = [pytest.mark.slow]
    if path.stem in NEEDS_VLLM:
        reason = "vLLM is not installed; `make setup` installs it where that is possible"
        marks += [pytest.mark.vllm, pytest.mark.skipif(not installed("vllm"), reason=reason)]
    return pytest.param(path, marks=marks, id=path.stem)


def run_as_notebook(path: Path, folder: Path) -> Any:
    """Runs a notebook in a kernel of this Python; a cell that fails raises."""
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(path)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources).execute()
    return notebook


def run_as_script(path: Path, folder: Path) -> None:
    """Runs a notebook's cells as the Python file that it is."""
    env = os.environ | {"MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def has_picture(cell: Any) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_the_tutorials_are_there():
    assert {path.stem for path in NOTEBOOKS} == {
        "first_steps",
        "choosing_layer_and_dose",
        "exact_probabilities_and_entropy",
        "steering_at_scale_with_vllm",
        "sequences_and_entropy_gradients",
        "an_honest_null",
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


@pytest.mark.filterwarnings("default")  # the notebook tools' own warnings are not ours
@pytest.mark.parametrize("path", [of_each_notebook(path) for path in NOTEBOOKS])
def test_runs(path: Path, tmp_path: Path):
    """In a Jupyter kernel where Jupyter is installed (the extra `notebooks`), else as the script that it is too."""
    if not all(map(installed, JUPYTER)):
        run_as_script(path, tmp_path)
        return
    notebook = run_as_notebook(path, tmp_path)
    for cell in notebook.cells:
        if cell.cell_type == "code" and draws(cell.source):
            assert has_picture(cell), f"no figure is shown by the cell\n{cell.source[:200]}"
