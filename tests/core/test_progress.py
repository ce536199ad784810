"""Progress bars: one at a time, none where nobody looks, none left behind."""

import io
import os
import pty
import subprocess
import sys
import termios

import pytest

from steerlab.core import _progress as module
from steerlab.core._progress import progress

WORK = """
from steerlab.core import _progress as module
module.DELAY = 0.0
with module.progress(3, "outer", "arm") as bar:
    for _ in range(3):
        with module.progress(5, "inner") as inner:
            inner.update(5)
        bar.update()
        bar.refresh()
"""


def on_a_terminal(script: str) -> str:
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 100))
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=writer, stdin=writer, check=True)
    assert done.returncode == 0
    os.close(writer)
    shown = b""
    try:
        while chunk := os.read(reader, 4096):
            shown += chunk
    except OSError:  # Linux's end of a terminal
        pass
    os.close(reader)
    return shown.decode()


def test_one_bar_on_a_terminal_that_is_wiped_at_the_end():
    shown = on_a_terminal(WORK)
    assert "outer: 100%" in shown
    assert "3/3" in shown
    assert "arm/s" in shown
    assert "inner" not in shown
    assert shown.rpartition("\r")[2] == ""
    assert shown.rstrip("\r").rpartition("\r")[2].strip() == ""


def test_silent_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress(2, "outer") as bar:
        bar.update()
        bar.refresh()
    assert sys.stderr.getvalue() == ""


def test_short_work_is_silent():
    assert on_a_terminal(WORK.replace("module.DELAY = 0.0", "").replace("bar.refresh()", "pass")) == ""


def test_a_bar_follows_one_that_ended_with_an_error():
    failing = "try:\n    with module.progress(2, 'first'):\n        raise ValueError\nexcept ValueError:\n    pass\n"
    first, rest = WORK.split("with ", 1)
    assert "outer: 100%" in on_a_terminal(f"{first}{failing}with {rest}")


def test_a_notebook_shows_one_bar_and_keeps_none():
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run with nbclient")
    nbformat = pytest.importorskip("nbformat", reason="notebooks are made with nbformat")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(WORK), nbformat.v4.new_code_cell("print('after')")]
    seen = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            if msg["msg_type"] in ("display_data", "update_display_data"):
                seen.append(msg["content"]["data"]["text/html"])
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=120).execute()
    assert any("outer <progress" in html and "3/3" in html and "arm/s" in html for html in seen)
    assert not any("inner" in html for html in seen)
    (output,) = notebook.cells[0].outputs
    assert output.data == {"text/plain": "", "text/html": ""}
    assert notebook.cells[1].outputs[0].text == "after\n"
