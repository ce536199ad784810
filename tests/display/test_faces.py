"""The face of every result: a finding in one line, markup as text, no network, small, and readable colours."""

import re

import pytest

import steerlab as sl
from steerlab.display.colors import contrast
from tests.display.one_of_each import EVIL, one_of_each
from tests.display.test_display import Reader

WITHOUT_TEXTS = """
Activations DiagnosticsPack DiagnosticsResults Diagnostics Divergence FeatureActivations HeadRanking LensEngine
LogprobResults ModelInfo Perplexity Score Scores SelfCheck SequenceDiagnostics SparseAutoencoder TokenStepDiagnostics
Transfer
""".split()
"""Results that hold numbers and hashes only; of some, the receipts name a vector."""

WITH_TEXTS = """
BaselineComparison
BatchedSequences
ChoiceItems
Completion
Confirmation
ContrastPairs
Effect
Experiment
Explanation
Generations
Interaction
JudgeAgreement
JudgedTexts
Judgements
PairJudgements
Parity
Plan
Preregistration
ProtocolResult
Receipt
Receipts
Results
RubricJudge
RunComparison
Selection
SteeringVector
Targets
TokenView
TruthQuestions
VectorSet
Verification
""".split()
NAMES = sorted([*WITHOUT_TEXTS, *WITH_TEXTS])


@pytest.fixture(scope="module")
def results(tiny_llama_engine, tmp_path_factory):
    return one_of_each(tiny_llama_engine, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def faces(results):
    return {name: one._repr_html_() for name, one in results.items()}


def test_every_result_is_tried(results):
    assert sorted(results) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_result_prints_as_its_finding_in_one_line(results, name):
    printed = repr(results[name])
    assert printed.startswith(f"{name}(")
    assert "\n" not in printed
    assert re.search(r"\d|unsteered|passed", printed)
    assert "array(" not in printed
    assert len(printed) < 600


@pytest.mark.parametrize("name", NAMES)
def test_markup_is_shown_as_text(faces, name):
    read = Reader(faces[name])
    assert {"script", "b"} & set(read.tags) == set()
    assert read.text.strip()


@pytest.mark.parametrize("name", sorted(set(WITH_TEXTS) - {"Completion", "Parity", "RunComparison", "Verification"}))
def test_texts_are_shown(faces, name):
    assert EVIL in Reader(faces[name]).text


@pytest.mark.parametrize("name", NAMES)
def test_a_face_needs_nothing_else_and_is_small(faces, name):
    assert not re.search(r"https?:|url\(|<link|<script|@import", re.sub(r'src="data:[^"]*"', "", faces[name]))
    assert len(faces[name].encode()) < 300_000


def test_pictures_say_what_they_show(faces):
    found = [tag for face in faces.values() for tag in re.findall(r"<(?:img|svg)[^>]*", face)]
    assert len(found) >= 3
    assert all(re.search(r'(alt|aria-label)="[^"]{10,}', tag) for tag in found)


def test_colours_come_with_text_that_can_be_read_on_them(faces):
    found = [pair for face in faces.values() for pair in re.findall(r"background:#(\w{6});color:#(\w{3})", face)]
    assert len(set(found)) > 20
    for background, ink in found:
        rgb = tuple(int(background[k : k + 2], 16) / 255 for k in (0, 2, 4))
        assert contrast(rgb, (0.0, 0.0, 0.0) if ink == "000" else (1.0, 1.0, 1.0)) >= 4.5


def test_a_closed_engine_still_has_a_face(tiny_gpt2_path):
    engine = sl.load(tiny_gpt2_path, device="cpu")
    assert "layers" in repr(engine)
    engine.close()
    assert repr(engine) == "LensEngine(closed)"
    assert "closed" in engine._repr_html_()


def test_receipts_are_a_tuple_with_a_face(results):
    receipts = results["Receipts"]
    assert receipts == tuple(receipts)
    assert repr(receipts) == f"Receipts(4 rows, {receipts.edited} edited tokens)"
    assert repr(type(receipts)()) == "Receipts(nothing ran)"
    assert "steered" in repr(type(receipts)([sl.Receipt(0, 0, None)]))


def test_names_do_not_break_the_line():
    vector = sl.SteeringVector.from_tensor([1.0, 2.0], layer=0, name="a\nb")
    assert "\n" not in repr(sl.Plan(sl.add(vector, coef=1.0)))


def test_a_thousand_tokens_of_an_explanation_are_small():
    vector = sl.SteeringVector.from_tensor([1.0, 2.0], layer=0)
    shown = sl.explain(sl.Plan(sl.add(vector, coef=1.0, where=sl.where.all())), list(range(1000)))
    assert len(shown._repr_html_().encode()) < 300_000
