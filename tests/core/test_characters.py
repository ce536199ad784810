"""Half a character is refused wherever text enters, by its own error."""

import json

import pytest
import torch

import steerlab as sl
from steerlab.core._characters import half_character
from steerlab.core._encoded_pairs import check_variants, encode_pairs
from steerlab.core._files import write_atomic
from steerlab.core._stopping import stop_strings
from steerlab.core._text import EncodedPrompt, encode_prompt
from steerlab.steering.positions.where import span
from steerlab.steering.vectors import VectorCard
from tests.tiny_models import build_tiny_tokenizer

HALF = "cut \ud83d"
TOKENIZER = build_tiny_tokenizer(chat=True)
D_VOCAB = len(TOKENIZER)
RECORDS = [{"prompt": "a", "target": "b", "label": 1}, {"prompt": "a", "target": HALF, "label": -1}]


def prompt(given, **options):
    return encode_prompt(TOKENIZER, given, d_vocab=D_VOCAB, **options)


def pairs(target, **options):
    return encode_pairs(TOKENIZER, [EncodedPrompt((5, 6), None)], [[target]], d_vocab=D_VOCAB, **options)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: prompt(HALF), sl.PromptError),
        (lambda: prompt(HALF, chat=True), sl.PromptError),
        (lambda: prompt([{"role": "user", "content": HALF}]), sl.PromptError),
        (lambda: prompt([{"role": HALF, "content": "a"}]), sl.PromptError),
        (lambda: pairs(HALF), sl.TargetError),
        (lambda: pairs(HALF, boundary="separate"), sl.TargetError),
        (lambda: pairs("a", variants=(HALF,)), sl.TargetError),
        (lambda: stop_strings(HALF), sl.InputError),
        (lambda: stop_strings(["a", HALF]), sl.InputError),
        (lambda: sl.ContrastPairs.from_lists(["a"], [HALF]), sl.DataError),
        (lambda: sl.ContrastPairs.from_lists(["a"], ["b"], [HALF]), sl.DataError),
        (lambda: sl.ContrastPairs.from_lists([[{"role": "user", "content": HALF}]], ["b"]), sl.DataError),
        (lambda: sl.Targets.from_records(RECORDS), sl.DataError),
        (lambda: span(HALF), sl.PlanError),
        (lambda: sl.SteeringVector.from_tensor(torch.ones(4), layer=1, name=HALF), sl.VectorValueError),
        (lambda: VectorCard(notes=HALF), sl.VectorValueError),
        (lambda: write_atomic("never.txt", HALF), sl.InputError),
        (lambda: sl.Experiment(HALF, "no-model"), sl.InputError),
    ],
)
def test_it_is_refused_by_name(make, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=r"holds half a character, '\\ud83d' at position 4"):
        make()
    assert list(tmp_path.iterdir()) == []


def test_a_file_cannot_have_such_a_name(tmp_path):
    with pytest.raises(sl.InputError, match=r"Cannot write '.*cut \\ud83d'"):
        write_atomic(tmp_path / HALF, "text")


def test_whole_characters_pass():
    assert half_character(["🙂", {"é": ["東", 3, None]}, [5, 6]]) is None
    assert half_character(json.loads('"\\ud83d\\ude00"')) is None
    assert check_variants(["", " "]) == ("", " ")
