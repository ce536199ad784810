"""The report's section on transfer: where a plan was run, how far its slope came with it, and nothing too wide."""

import re
import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import steerlab as sl
from steerlab.experiment.measurements.transfer import transfer_sections, transfer_table
from tests.experiment.data import DEV, HELD_OUT, PAIRS, TARGETS, TEXTS
from tests.experiment.test_report_page import Page
from tests.tiny_models import build_tiny_llama

DOSES = [-0.2, 0.0, 0.2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def experiment(tiny_llama_engine: sl.LensEngine, tmp_path_factory: pytest.TempPathFactory) -> sl.Experiment:
    root = tmp_path_factory.mktemp("runs")
    exp = sl.Experiment("travels", tiny_llama_engine, root=root, seed=3)
    vectors = exp.extract(PAIRS, layers=[1, 2])
    plan, other_plan = (sl.Plan(sl.add(vectors[layer], dose=1.0)) for layer in (1, 2))
    exp.effect(plan, TARGETS, DOSES, controls=sl.Controls(random=0), neutral=TEXTS, max_ppl_ratio=50.0)
    elsewhere = sl.load(build_tiny_llama(root / "another", seed=5), dtype="float32")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="About ")
        exp.transfer(plan, HELD_OUT, DOSES)
        exp.transfer(plan, HELD_OUT, DOSES, engine=elsewhere)
        exp.transfer(other_plan, DEV, DOSES, engine=elsewhere, metric="choice_prob")
    return exp


def words_of(html: str) -> str:
    """The words of the section on transfer."""
    return Page(html).words.split(" Transfer ", 2)[-1].split(" Vectors ")[0]


@pytest.fixture(scope="module")
def html(experiment: sl.Experiment) -> str:
    return experiment.report().read_text(encoding="utf-8")


def test_each_transfer_says_plan_place_and_what_is_left_of_the_effect(experiment: sl.Experiment, html: str) -> None:
    (effect,), transfers = experiment.effects, experiment.results.transfers
    words = words_of(html)
    for one in transfers[:2]:
        share = 100 * one.slope / effect.slope
        assert f"run on {one.model} with 3 items in 3 groups" in words
        assert f"That is {share:.0f} % of the slope of its effect above".replace("-", "−") in words
    assert words.count(effect.plan_text) == 2
    assert words.count("of the slope of its effect above") == 2, "another plan has no effect to compare with"
    assert "p of the positive targets" in words


def test_a_table_compares_several(experiment: sl.Experiment) -> None:
    transfers = experiment.results.transfers
    table = transfer_table(transfers, experiment.effects)
    assert table.transfer.tolist() == [1, 2, 3]
    assert table.slope.tolist() == [one.slope for one in transfers]
    assert table["of effect"].tolist()[2] == "–"
    (section,) = transfer_sections(transfers[:1], experiment.effects)
    assert [type(block).__name__ for block in section.blocks] == ["Paragraph", "Table", "Paragraph"]
    assert transfer_sections([], experiment.effects) == []


def test_what_differs_there_is_said_with_short_hashes(experiment: sl.Experiment, html: str) -> None:
    words, (_, other, _) = words_of(html), experiment.results.transfers
    assert "it was made on" in words
    assert f"Weights {other.weights_hash[:12]}…" in words
    assert not re.search(r"[0-9a-f]{33}", words)
    assert "Transfers ran without control arms" in Page(html).words


def test_one_group_has_no_interval(experiment: sl.Experiment) -> None:
    one = replace(experiment.results.transfers[0], low=float("nan"), high=float("nan"))
    (section,) = transfer_sections([one], [])
    sentence = getattr(section.blocks[0], "text")  # noqa: B009
    assert "no interval: one group" in sentence
    assert "per unit of scale" in sentence, "without its effect the plan's unit is not known"


def test_markdown_has_it_too(experiment: sl.Experiment, tmp_path: Path) -> None:
    text = experiment.report(tmp_path / "report.md").read_text(encoding="utf-8")
    rendered = MarkdownIt("commonmark").enable("table").render(text)
    assert "Transfer 3" in Page(rendered).words
    assert "of the slope of its effect above" in Page(rendered).words


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_its_window(html: str, tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(html, encoding="utf-8")
    outside = tmp_path / "outside.html"
    outside.write_text(
        f'<iframe src="report.html" style="width:{width}px;height:900px;border:0" onload="'
        "const root = this.contentDocument.documentElement;"
        "document.title = 'measured ' + root.scrollWidth + ' of ' + root.clientWidth;"
        '"></iframe>',
        encoding="utf-8",
    )
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [CHROMIUM, *options, profile, "--virtual-time-budget=10000", outside.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    measured = re.search(r"measured (\d+) of (\d+)", shown)
    assert measured is not None, shown[:500]
    assert int(measured[1]) <= int(measured[2]) <= width
