"""Tokenizers that put a space before every text."""

import pytest

import steerlab as sl
from tests import spacing_cases as cases


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cases.build(tmp_path_factory.mktemp("spacing") / "llama2")


@pytest.fixture(scope="module")
def engine(path):
    with sl.load(path, device="cpu") as engine:
        yield engine


def test_completions_and_stop_strings(engine):
    cases.check_texts(engine)


def test_scores(engine, path):
    cases.check_scores(engine, path)


def test_a_stream_spells_what_generate_does(engine):
    assert "".join(engine.stream(cases.PROMPT, max_new_tokens=3)) == " yesan yes"
    assert next(iter(engine.stream(cases.PROMPT, max_new_tokens=3))) == " yes"
    assert list(engine.stream(cases.PROMPT, max_new_tokens=8, stop=" yes")) == []


def test_frames_show_the_space_of_a_token(engine):
    scores = engine.score([cases.PROMPT], [[" Paris"]])
    assert scores.tokens_frame(engine.tokenizer).token.tolist() == [" Paris"]
