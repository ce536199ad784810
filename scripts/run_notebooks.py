"""Run the notebooks, for the documentation: their outputs go to build/notebooks/NAME.ipynb.

Usage: ``.venv/bin/python scripts/run_notebooks.py [NAME ...]``

A kernel per processor runs them, with its names cleared in between, so that libraries are imported once; the one with
vLLM has a kernel of its own. A notebook whose text and package are as they were when it was last run is not run again.
The run fails if a cell does. It says how much processor time each took, and whether that is far from what its first
cell says.
"""

import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

import jupytext
import nbformat
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "notebooks"
APART = {"steering_at_scale_with_vllm": "vllm"}
"""Notebooks with a kernel of their own, and the package that they need."""
TIMEOUT = 900
"""Seconds after which a cell counts as hung; no bound on its speed."""
AFTER = """
import sys as _sys, time as _time
if "matplotlib.pyplot" in _sys.modules:
    _sys.modules["matplotlib.pyplot"].close("all")
_time.process_time()
"""


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all."""
    paths = [ROOT / "notebooks" / f"{name}.py" for name in names] or sorted((ROOT / "notebooks").glob("*.py"))
    BUILT.mkdir(parents=True, exist_ok=True)
    due = [path for path in paths if not is_built(path)]
    missing = [path for path in due if path.stem in APART and not find_spec(APART[path.stem])]
    for path in missing:
        say(f"{path.stem}: NOT RUN, because {APART[path.stem]} is not installed; its page has no outputs")
        write(path, jupytext.read(path), None, inputs(path))
    longest_first = sorted(set(due) - set(missing), key=lambda path: -stated_seconds(jupytext.read(path)))
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    kernels = max(1, min(len(longest_first), processors))
    waiting: SimpleQueue[Path | None] = SimpleQueue()
    for path in [*longest_first, *[None] * kernels]:
        waiting.put(path)
    with ThreadPoolExecutor(kernels) as pool:
        for one in [pool.submit(run_until_none, waiting, processors // kernels) for _ in range(kernels)]:
            one.result()


def run_until_none(waiting: SimpleQueue[Path | None], threads: int) -> None:
    """Run notebooks that nobody else has taken, in a kernel of so many threads."""
    with ExitStack() as shared:
        together = None
        for path in iter(waiting.get, None):
            if path.stem in APART:
                with kernel(threads) as apart:
                    run(path, apart)
            else:
                together = together or shared.enter_context(kernel(threads))
                run(path, together)


@contextmanager
def kernel(threads: int) -> Iterator[KernelManager]:
    """A running kernel whose libraries compute with so many threads."""
    manager, client = start_new_kernel(kernel_name="python3", env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    client.stop_channels()
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def run(path: Path, manager: KernelManager) -> None:
    """Run one notebook, from its first cell to its last."""
    notebook, made_from = jupytext.read(path), inputs(path)
    own = list(notebook.cells)
    clock = [nbformat.v4.new_code_cell(AFTER) for _ in range(2)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        clear = [nbformat.v4.new_code_cell(code) for code in (f"%cd -q {folder}", "%reset -f")]
        notebook.cells = [*clear, clock[0], *own, clock[1], nbformat.v4.new_code_cell("%cd -q /")]
        NotebookClient(notebook, timeout=TIMEOUT, km=manager).execute()
    used, (before, after) = time.monotonic() - start, (float(cell.outputs[-1].data["text/plain"]) for cell in clock)
    notebook.cells = own
    for number, cell in enumerate((cell for cell in own if cell.cell_type == "code"), start=1):
        cell.execution_count = number
    stated, spent = stated_seconds(notebook), after - before
    far = "" if spent <= 2 * stated else ", WHICH IS FAR TOO LITTLE"
    say(f"{path.stem}: {spent:.0f} s of processor time, {used:.0f} s in all; it says {stated} s{far}")
    write(path, notebook, spent, made_from)


def stated_seconds(notebook: nbformat.NotebookNode) -> int:
    """How long a notebook says that it takes."""
    found = re.search(r"about (\d+)\s+seconds", notebook.cells[0].source)
    if found is None:
        sys.exit("The first cell of a notebook says “about … seconds” of processor time.")
    return int(found[1])


def write(path: Path, notebook: nbformat.NotebookNode, seconds: float | None, made_from: str) -> None:
    """Write a notebook with its outputs, whole or not at all."""
    notebook.metadata["steerlab"] = {"inputs": made_from, "seconds": seconds}
    unfinished = BUILT / f"{path.stem}.part"
    nbformat.write(notebook, unfinished)
    unfinished.replace(BUILT / f"{path.stem}.ipynb")


def is_built(path: Path) -> bool:
    """Ask whether the outputs are there and belong to this notebook and this package."""
    built = BUILT / f"{path.stem}.ipynb"
    if not built.exists():
        return False
    known = nbformat.read(built, as_version=4).metadata["steerlab"]
    not_run = known["seconds"] is None
    return known["inputs"] == inputs(path) and not (not_run and find_spec(APART[path.stem]))


def inputs(path: Path) -> str:
    """Hash of everything of ours that a notebook's outputs follow from."""
    files = [path, *(ROOT / "steerlab").rglob("*.py"), *(ROOT / "vectors").glob("*/*")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def say(text: str) -> None:
    """Print a line at once."""
    print(f"[notebooks] {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
