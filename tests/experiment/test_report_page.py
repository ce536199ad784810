"""The page: it stands alone, parses, and is accessible; and Markdown says the same."""

import base64
import html
import itertools
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from markdown_it import MarkdownIt

import steerlab as sl
from steerlab.core.errors import InputError
from steerlab.experiment._blocks import Document, Paragraph, Section
from steerlab.experiment._report import Finding, Material, write_material
from steerlab.experiment._report.markdown import escape, fenced
from steerlab.experiment._report.page import identifiers
from steerlab.experiment.measurements.selfcheck import Check, SelfCheck
from tests.experiment.frames import make_effect

VOID = {"meta", "img", "br", "link", "input", "hr"}
NASTY = "<script>alert('1')</script> & \"quoted\" | _pipe_ `tick` $x$ {{ 7 * 7 }}"


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    yield
    assert not plt.get_fignums()


class Page(HTMLParser):
    """A page's elements in order, refusing tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in {tag}"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def entropies() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    columns = ["base", "steered", "raw_base", "raw_steered", "kl", "policy_kl", "kept", "jaccard"]
    frame = pd.DataFrame(rng.random((12, len(columns))), columns=columns)
    return frame.assign(text=np.repeat([0, 1], 6), position=np.tile(np.arange(1, 7), 2), plan=NASTY, policy="T=1")


def material(**changes: object) -> Material:
    generations = pd.DataFrame(
        [(i, 0, NASTY, dose, f"{NASTY} at {dose}\n\nand ```fences```") for i in range(2) for dose in (-0.2, 0.0, 0.2)],
        columns=["prompt_index", "sample_index", "prompt", "dose", "text"],
    )
    cost = pd.DataFrame({"dose": [0.0, 0.2], "ppl_ratio": [1.0, 1.2], "ppl_ratio_low": [1.0, 1.1]})
    check = Check("dose 0 equals the unsteered model", True, 0.0, 0.0, NASTY)
    vectors = sl.VectorSet(
        tuple(sl.SteeringVector.from_tensor(torch.tensor([1.0, float(k)]), layer=k, name=NASTY) for k in (1, 2))
    )
    given: dict = {
        "name": NASTY,
        "seed": 3,
        "effects": [make_effect([2.0, 4.0, -1.0], nulls={"random": [0.5] * 19, "shuffled": [0.1]})],
        "vectors": [vectors],
        "costs": [cost.assign(ppl_ratio_high=[1.0, 1.3])],
        "entropies": [entropies()],
        "generations": [generations],
        "token_texts": [pd.DataFrame({"token": ["<b>", " b"], "base": [-1.0, -2.0], "steered": [-2.0, -1.5]})],
        "layer_doses": [pd.DataFrame({"layer": [1, 2], "dose": [0.1, 0.1], "value": [1.0, -2.0]})],
        "selfchecks": [SelfCheck((check,), "lens, tiny, float32", "add", 0)],
        "others": {NASTY: [Finding([NASTY], pd.DataFrame({NASTY: [NASTY]}), False, "a/file")]},
        "facts": {"versions": {"torch": "2.13"}},
    }
    return Material(**(given | changes))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_material(material(), tmp_path_factory.mktemp("page") / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


# --- the page stands alone ----------------------------------------------------------------------------------------


def test_nothing_comes_from_elsewhere(source: str, page: Page) -> None:
    outside = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", source)
    assert not re.search(r"https?://|//[a-z]|@import|url\(", outside)
    for tag, attributes in page.elements:
        for name in ("src", "href", "data", "poster", "action", "srcset"):
            value = attributes.get(name, "#")
            assert value.startswith(("#", "data:image/svg+xml;base64,")), (tag, name, value[:60])


def test_no_script_runs(page: Page) -> None:
    assert not page.of("script")
    assert not page.of("iframe")
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "alert('1')" in page.words
    assert "{{ 7 * 7 }}" in page.words


def test_pictures_are_whole_and_load_nothing(page: Page) -> None:
    images = page.of("img")
    assert len(images) == 9
    for image in images:
        svg = base64.b64decode(image["src"].split(",", 1)[1])
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        links = [value for e in root.iter() for name, value in e.attrib.items() if name.endswith("href")]
        assert all(link.startswith(("#", "data:")) for link in links)


# --- the page is accessible ---------------------------------------------------------------------------------------


def test_every_picture_says_its_finding(page: Page) -> None:
    for image in page.of("img"):
        assert len(image["alt"]) > 20
        assert re.search(r"\d", image["alt"])
    assert len({image["alt"] for image in page.of("img")}) == len(page.of("img"))


def test_identifiers_are_unique_and_links_reach_them(page: Page) -> None:
    found = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(found) == len(set(found))
    assert {link["href"] for link in page.of("a")} == {f"#{name}" for name in found}
    assert {section["aria-labelledby"] for section in page.of("section")} == set(found)


def test_headings_descend_one_at_a_time(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_language_and_viewport_are_stated(page: Page) -> None:
    assert page.of("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert page.of("title")


def test_table_headings_have_a_scope_and_tables_scroll_in_their_own_box(page: Page) -> None:
    assert {heading["scope"] for heading in page.of("th")} == {"col", "row"}
    before = [page.elements[i - 1] for i, (tag, _) in enumerate(page.elements) if tag == "table"]
    assert before
    for tag, attributes in before:
        assert (tag, attributes["class"], attributes["tabindex"]) == ("div", "scroll", "0")
        assert attributes["aria-label"]


def test_the_page_prints_and_fits_a_phone(source: str) -> None:
    assert "@media print" in source
    assert "@media (max-width: 40rem)" in source


# --- what it says -------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_with_its_reasons(page: Page) -> None:
    effect = material().of("effects")[0]
    assert page.words.index("Verdict: ") < page.words.index("Per dose")
    for reason in effect.reasons:
        assert reason in page.words


def test_every_part_has_its_section(page: Page) -> None:
    for title in (
        "Effect",
        "Selfcheck",
        "Layers and doses",
        "Entropy and divergence",
        "Cost on further text",
        "Generations side by side",
        "Token by token",
        "Vectors",
        "Provenance",
        "Limits: what these numbers cannot say",
    ):
        assert f" {title} " in page.words, title


def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    bare = Material("bare", 0, effects=[make_effect([1.0, 2.0])])
    page = Page(write_material(bare, tmp_path / "bare.html").read_text(encoding="utf-8"))
    for title in ("Selfcheck", "Parity", "Generations", "Entropy"):
        assert title not in page.words
    assert "No control arm was run." in page.words
    assert "Not compared with: random directions, label flips, wrong layer." in page.words


def test_tooltips_carry_both_log_probs(page: Page) -> None:
    titles = [span["title"] for span in page.of("span")]
    assert titles == ["log p −1.00 → −2.00 (−1.00 nats)", "log p −2.00 → −1.50 (+0.50 nats)"]


def test_the_same_results_give_the_same_page(source: str, tmp_path: Path) -> None:
    assert write_material(material(), tmp_path / "again.html").read_text(encoding="utf-8") == source


# --- Markdown -----------------------------------------------------------------------------------------------------


def test_markdown_has_the_same_sections_and_its_pictures_beside_it(tmp_path: Path, page: Page) -> None:
    path = write_material(material(), tmp_path / "report.md")
    text = path.read_text(encoding="utf-8")
    html = Page(MarkdownIt("commonmark").enable("table").render(text))
    for effect in material().of("effects"):
        assert f"Verdict: {effect.verdict}" in html.words
    names = [image["src"] for image in html.of("img")]
    assert len(names) == len(set(names)) == len(page.of("img"))
    for name in names:
        ElementTree.fromstring((tmp_path / name).read_bytes())
    assert [image["alt"] for image in html.of("img")] == [image["alt"] for image in page.of("img")]
    headings = [tag for tag, _ in html.elements if tag == "h2"]
    assert len(headings) == len(page.of("h2"))
    assert len(html.of("table")) == len(page.of("table"))
    assert not html.of("script")
    assert NASTY in html.words


def test_markdown_shows_text_as_it_is() -> None:
    for text in (NASTY, "# no heading", "a*b*c [x](y) ~~z~~", "two\n\nlines"):
        html = Page(MarkdownIt("commonmark").enable("table").render(escape(text)))
        assert html.words.strip() == re.sub(r"\s+", " ", text)
        assert [tag for tag, _ in html.elements] == ["p"]


def test_fences_outlast_the_text() -> None:
    assert fenced("a ````b").startswith("`````text\n")
    assert fenced("plain").startswith("```text\n")


# --- paths and identifiers ----------------------------------------------------------------------------------------


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.html or \.md; 'report.pdf'"):
        write_material(material(), tmp_path / "report.pdf")


def test_like_titles_get_different_identifiers() -> None:
    sections = [Section(title, [Paragraph("x")]) for title in ("Cost", "cost!", "Cost", "‡")]
    assert identifiers(Document("t", "l", sections)) == ["cost", "cost--2", "cost--3", "section"]


def test_one_sentence_is_not_a_list_of_letters() -> None:
    with pytest.raises(InputError, match="put it in a list"):
        Finding("one sentence")


def test_a_written_report_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    path = write_material(Material("<b>run</b>", 0, effects=[make_effect([1.0, 2.0])]), tmp_path / "report.html")
    shown = path._repr_html_()
    found = re.search(r'<iframe [^>]*srcdoc="([^"]*)"', shown)
    assert found is not None
    assert html.unescape(found[1]) == path.read_text(encoding="utf-8")
    assert "<b>run</b>" not in shown
    assert isinstance(path, Path)
    path.unlink()
    assert "<iframe" not in path._repr_html_()
    assert (
        "<iframe"
        not in write_material(Material("run", 0, effects=[make_effect([1.0, 2.0])]), tmp_path / "a.md")._repr_html_()
    )
