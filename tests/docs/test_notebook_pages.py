"""Outputs of notebooks in the documentation: shown whole, and never taken for Markdown or markup."""

import base64
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks are read with nbformat")
pytest.importorskip("mkdocs", reason="`make docs` installs what builds the documentation")
markdown = pytest.importorskip("markdown", reason="`make docs` installs what builds the documentation")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "docs_pages.py"
NASTY = "<script>alert(1)</script> & *stars*\n\n```\n# no heading\n\n    no code"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(*outputs: Any, code: str = "f()", seconds: float | None = 3.2) -> Any:
    made = nbformat.v4.new_notebook(metadata={"steerlab": {"seconds": seconds}})
    made.cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell(code, outputs=list(outputs))]
    return made


def shown(data: dict[str, str], kind: str = "execute_result") -> Any:
    return nbformat.v4.new_output(kind, data)


def rendered(text: str) -> str:
    return markdown.markdown(text, extensions=["fenced_code", "tables", "md_in_html"])


def test_texts_are_text(pages: ModuleType) -> None:
    printed = nbformat.v4.new_output("stream", text=NASTY)
    page = rendered(pages.Page("n", notebook(printed, shown({"text/plain": NASTY}))).text())
    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; *stars*") == 2
    assert page.count("<h1") == 1
    assert "<em>stars" not in page


def test_html_is_kept_as_it_is(pages: ModuleType) -> None:
    face = '<style>\n p {\n }\n</style><div\n class="a"><p title="one\ntwo">a\n\n# b *c*\n\n    d</p></div>'
    page = rendered(pages.Page("n", notebook(shown({"text/html": face, "text/plain": "x"}))).text())
    assert '<div  class="a"><p title="one&#10;two">a&#10;&#10;# b *c*&#10;&#10;    d</p></div>' in page
    assert "<style>  p {  } </style>" in page


def test_a_picture_has_the_words_that_its_cell_returns(pages: ModuleType) -> None:
    png = base64.b64encode(b"picture").decode()
    words = shown({"text/plain": repr('It rises by "2" & more.')})
    page = pages.Page("n", notebook(words, shown({"image/png": png, "text/plain": "<Figure>"}, "display_data")))
    text = page.text()
    assert 'src="../n_files/1.png" alt="It rises by &quot;2&quot; &amp; more."' in text
    assert text.count("It rises by") == 2  # alternative text and caption
    assert page.pictures == {"tutorials/n_files/1.png": b"picture"}


def test_a_page_says_how_long_it_took_or_that_it_was_not_run(pages: ModuleType) -> None:
    assert "took 3 s of processor time" in pages.Page("n", notebook()).text()
    assert "not run when this page was built" in pages.Page("n", notebook(seconds=None)).text()


def test_magics_are_left_out(pages: ModuleType) -> None:
    assert "```python\nf()\n```" in pages.Page("n", notebook(code="%matplotlib inline\nf()")).text()
