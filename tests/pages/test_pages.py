"""The documentation, its notebooks and a report in a real browser: whole at every width, legible, and by themselves.

Needs Chromium, and what `make docs` builds. `make check-pages` sees to both.
"""

import functools
import html
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.chromium import Tab, chromium

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
REPORT = "report.html"
"""Address of the report of the notebook *A study of your own*."""
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
PAGES = ["index.html", REPORT, *(f"tutorials/{name}/index.html" for name in NOTEBOOKS)]
CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
A4 = 680
"""Width of an A4 page between margins of 15 mm, in CSS pixels."""
SCHEME = """(async expected => {
    const scheme = () => document.body.dataset.mdColorScheme
    for (let left = 100; left && scheme() !== expected; left--) await new Promise(done => setTimeout(done, 50))
    return scheme()
})"""
"""The page's colour scheme, as soon as it is the expected one or after five seconds."""
SHOTS = os.environ.get("STEERLAB_PAGES_SHOTS")
"""A folder for pictures of all pages, to look at."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif("STEERLAB_CHECK_PAGES" not in os.environ, reason="`make check-pages` runs these"),
]


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves the documentation, and a report beside it, without a log."""

    report = b""

    def do_GET(self) -> None:
        if self.path != f"/{REPORT}":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.report)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the documentation."""
    assert (SITE / "index.html").is_file(), "site/ is missing; run `make docs` first"
    notebook = json.loads((ROOT / "build/notebooks/a_study_of_your_own.ipynb").read_text(encoding="utf-8"))
    shown = "".join(notebook["cells"][-2]["outputs"][-1]["data"]["text/html"])
    Server.report = html.unescape(shown.partition('srcdoc="')[2].partition('"')[0]).encode()
    handler = functools.partial(Server, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser.tab()


def checked(tab: Tab, *, paper: bool = False) -> list[str]:
    """What is wrong with the page that is open."""
    found = tab.run(f"{CHECKS}({str(paper).lower()})")
    assert found["texts"] > 20, "the page is empty"
    return found["problems"]


def picture(tab: Tab, page: str, name: str) -> None:
    if SHOTS:
        tab.picture(Path(SHOTS) / f"{page.removesuffix('/index.html').replace('/', '-')}-{name}.png")


def elsewhere(tab: Tab, site: str) -> list[str]:
    """Requests that leave the page's own site."""
    return [url for url in tab.requested if not url.startswith((f"{site}/", "data:", "blob:", "about:"))]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", PAGES)
def test_page_on_a_screen(tab: Tab, site: str, page: str, width: int, dark: bool) -> None:
    tab.show(f"{site}/{page}", width=width, dark=dark)
    tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
    if page != REPORT:
        expected = "slate" if dark else "default"
        assert tab.run(f"{SCHEME}('{expected}')") == expected
    picture(tab, page, f"{width}-{'dark' if dark else 'light'}")
    assert checked(tab) == []
    assert elsewhere(tab, site) == []
    assert f"{site}/{page}" in tab.requested


@pytest.mark.parametrize("page", PAGES)
def test_page_on_paper(tab: Tab, site: str, page: str) -> None:
    tab.show(f"{site}/{page}", width=A4, media="print")
    assert checked(tab, paper=True) == []
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF")
    if SHOTS:
        (Path(SHOTS) / f"{page.removesuffix('/index.html').replace('/', '-')}.pdf").write_bytes(pdf)


BROKEN = {
    "beyond the edge": '<p style="width:3000px">wide</p>',
    "clipped": '<div style="overflow:hidden;width:50px"><p style="width:300px">cut</p></div>',
    "contrast": '<p style="color:#aaa;background:#fff">pale</p>',
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_checks_find_what_is_wrong(tab: Tab, what: str) -> None:
    words = "".join(f"<p>word {k}</p>" for k in range(25))
    tab.show(f"data:text/html,<main>{words}{BROKEN[what].replace('#', '%23')}</main>", width=390)
    assert any(problem.startswith(what) for problem in checked(tab))


def test_requests_elsewhere_are_noticed(tab: Tab) -> None:
    tab.show('data:text/html,<img src="http://example.org/a.png">', width=390)
    assert elsewhere(tab, "http://127.0.0.1") == ["http://example.org/a.png"]
