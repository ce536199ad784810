"""An engine in a notebook: its cells show what they compute, and one line of vLLM's."""

import os

import pytest

from tests.vllm import forked
from tests.vllm.conftest import OPTIONS

nbclient = pytest.importorskip("nbclient", reason="notebooks are run with nbclient")
nbformat = pytest.importorskip("nbformat", reason="notebooks are made with nbformat")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_START = """
import os
os.environ[{asked_by!r}] = str(os.getpid())
import steerlab as sl
engine = sl.VLLMEngine({path!r}, layers=[1], **{options!r})
"""
_CELLS = [_START, "print(len(engine.generate(['Two plus two'], max_new_tokens=8)))", "engine.close()"]


def test_a_notebook_shows_its_own_output(tiny_path, monkeypatch, tmp_path):
    for name, value in {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "STEERLAB_CACHE": str(tmp_path),
        **forked.environment(tmp_path),  # the engine's worker is forked, but not the engine from a kernel with threads
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook()
    named = {"path": str(tiny_path), "options": OPTIONS, "asked_by": forked.ASKED_BY}
    notebook.cells = [nbformat.v4.new_code_cell(cell.format(**named)) for cell in _CELLS]
    nbclient.NotebookClient(notebook, timeout=500).execute(env=dict(os.environ))
    shown = [(k, output.get("text", str(output))) for k, cell in enumerate(notebook.cells) for output in cell.outputs]
    # tqdm's, without ipywidgets; and what is left of a bar, which a slow machine shows
    shown = [(k, text) for k, text in shown if "IProgress not found" not in text and "'text/html': ''" not in text]
    (log,) = (tmp_path / "logs").glob("*.log")
    assert shown == [(0, f"vLLM starts; its log is in {log}\n"), (1, "1\n")]
    text = log.read_text()
    assert "Loading weights took" in text  # by a worker
    assert "[shutdown] MPClient: complete" in text
    assert "leaked s" not in text  # shared memory or semaphores
