"""The recipes of CONTRIBUTING.md work: its blocks add an operator, a measurement and an extraction method to a copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
HEAD = re.compile(r"# (steerlab/\S+\.py)(?:, after: (.*))?")

PROGRAM = """
import steerlab as sl
from steerlab.engines.toy import ToyEngine
from steerlab.steering.operators import reflect

engine = ToyEngine()
pairs = sl.ContrastPairs.from_lists(["yes yes", "oh yes", "ya"], ["no no", "oh no", "na"])
vectors = sl.extract(engine, pairs, layers=[1], method="unit_diff")
assert vectors[1].card.method == "unit_diff"

once = sl.Plan(reflect(vectors[1], where="all"))
assert sl.Plan.from_json(once.to_json()).hash == once.hash
plain = engine.capture("abc", layers=1)[1]
mirrored = engine.capture("abc", layers=1, plan=once)[1]
unit = vectors[1].unit
assert ((plain + mirrored) @ unit).abs().max() < 1e-4
assert (plain - mirrored).norm() > 0.1

with sl.Experiment("run", engine, root="runs") as exp:
    made = exp.length(["the cat", "a dog"])
loaded = sl.Experiment.load("runs/run")
assert loaded.results.lengths[0].mean == made.mean == 6.0
assert "Mean 6 characters" in loaded.report("report.md").read_text()
"""


def blocks() -> list[tuple[Path, str | None, str]]:
    """(file, line after which it goes, or None for a new file, code) of the page's blocks that name a file."""
    found = []
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        first, _, rest = code.partition("\n")
        named = HEAD.fullmatch(first)
        if named:
            found.append((Path(named[1]), named[2], rest))
    return found


@pytest.mark.slow
def test_what_the_page_says_to_write_works(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "steerlab", tmp_path / "steerlab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "vectors", tmp_path / "vectors")
    for file, after, code in blocks():
        path = tmp_path / file
        if after is None:
            assert not path.exists(), f"{file} is there already"
            path.write_text(code)
            continue
        lines = path.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.startswith(after)]
        assert len(places) == 1, f"{file} has {len(places)} lines that begin with {after!r}"
        end = places[0] + 1
        while lines[end - 1].rstrip().endswith("("):  # a statement over several lines
            end = next(number for number in range(end, len(lines)) if lines[number].startswith(")")) + 1
        path.write_text("".join([*lines[:end], code, *lines[end:]]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_page_has_the_recipes() -> None:
    new = [file.name for file, after, _ in blocks() if after is None]
    assert new == ["_reflect.py", "length.py", "unit_differences.py"]
