"""A hook of MkDocs: the notebooks that `scripts/run_notebooks.py` ran become pages with their outputs and pictures."""

import ast
import base64
import html
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "notebooks"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PARTS = re.compile(r"<style.*?</style>|<[a-zA-Z/!][^>]*>|[^<]+|<", re.DOTALL)
_QUOTED = re.compile(r'"[^"]*"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page, its pictures and the notebook itself for each notebook."""
    for source in sorted((ROOT / "notebooks").glob("*.py")):
        built = BUILT / f"{source.stem}.ipynb"
        if not built.exists():
            raise PluginError(f"{built} is missing: `make docs` runs the notebooks first.")
        page = Page(source.stem, nbformat.read(built, as_version=4))
        made = {f"tutorials/{source.stem}.md": page.text(), f"tutorials/{source.stem}.ipynb": built.read_text()}
        for name, content in (made | page.pictures).items():
            files.append(File.generated(config, name, content=content))
    return files


class Page:
    """One notebook as Markdown; its pictures are files beside it."""

    def __init__(self, name: str, notebook: Any) -> None:
        self.name, self._notebook = name, notebook
        self.pictures: dict[str, bytes] = {}

    def text(self) -> str:
        """The page."""
        seconds = self._notebook.metadata["steerlab"]["seconds"]
        how = "**not run when this page was built**, because vLLM was not installed there"
        if seconds is not None:
            how = f"run when this page was built; that took {seconds:.0f} s of processor time"
        head, *rest = [part for cell in self._notebook.cells for part in self._cell(cell)]
        return "\n\n".join([head, f"*[The notebook]({self.name}.ipynb), {how}.*", *rest]) + "\n"

    def _cell(self, cell: Any) -> list[str]:
        if cell.cell_type == "markdown":
            return [cell.source]
        code = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%")).strip()
        caption = _caption(cell.outputs)
        shown = [self._output(output, caption) for output in cell.outputs]
        return [f"```python\n{code}\n```", *(part for part in shown if part)]

    def _output(self, output: Any, caption: str) -> str:
        if output.output_type == "stream":
            return _box(_preformatted(output.text))
        if output.output_type == "error":
            return _box(_preformatted("\n".join(output.traceback)))
        data = output.data
        if "image/png" in data:
            return self._picture(base64.b64decode(data["image/png"]), caption)
        if "text/html" in data:
            return _box(data["text/html"]) if data["text/html"] else ""
        return (
            "" if caption and _words(output) == caption else _box(_preformatted(_words(output) or data["text/plain"]))
        )

    def _picture(self, png: bytes, caption: str) -> str:
        place = f"{self.name}_files/{len(self.pictures) + 1}.png"
        self.pictures[f"tutorials/{place}"] = png
        words = html.escape(caption or "Plot made by the code above", quote=True)
        below = f'<p class="caption">{words}</p>' if caption else ""
        return _box(f'<img class="plot" src="../{place}" alt="{words}">{below}')


def _caption(outputs: Any) -> str:
    """What a cell that draws says of its picture, if it returns words."""
    has_picture = any("image/png" in output.get("data", {}) for output in outputs)
    return next((words for output in outputs if (words := _words(output))), "") if has_picture else ""


def _words(output: Any) -> str:
    """The text of a string that a cell returned; empty for anything else."""
    if output.output_type != "execute_result" or "text/html" in output.data:
        return ""
    try:
        found = ast.literal_eval(output.data["text/plain"])
    except (SyntaxError, ValueError):
        return ""
    return found if isinstance(found, str) else ""


def _preformatted(text: str) -> str:
    return f"<pre><code>{html.escape(_ESCAPES.sub('', text).strip())}</code></pre>"


def _box(inside: str) -> str:
    """HTML on one line, so that nothing in it is taken for Markdown."""
    one_line = _PARTS.sub(lambda part: _on_one_line(part[0]), inside)
    return f'<div class="output" tabindex="0">{one_line}</div>'


def _on_one_line(part: str) -> str:
    """A style sheet, a tag or a text without line breaks; where they count, in texts and attributes, as references."""
    if part.startswith("<style"):
        return part.replace("\n", " ")
    if part.startswith("<"):
        return _QUOTED.sub(lambda value: value[0].replace("\n", "&#10;"), part).replace("\n", " ")
    return part.replace("\n", "&#10;") if part.strip() else " "
