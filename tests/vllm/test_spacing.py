"""Texts on vLLM: tokenizers that put a space before every text, and prompts with half a character."""

import pytest

from steerlab.core.errors import PromptError
from tests import spacing_cases as cases

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cases.build(tmp_path_factory.mktemp("spacing") / "llama2")


@pytest.fixture(scope="module")
def engine(start, path):
    with start(path, layers=[0]) as engine:
        yield engine


def test_completions_and_stop_strings(engine):
    cases.check_texts(engine)


def test_scores(engine, path):
    cases.check_scores(engine, path)


def test_half_a_character_fails_its_prompt_alone(engine):
    made = engine.generate([cases.PROMPT, "cut \ud83d"], max_new_tokens=3, on_error="return")
    assert [completion.finish_reason for completion in made] == ["length", "error"]
    assert made[0].text == " yesan yes"
    with pytest.raises(PromptError, match="holds half a character"):
        engine.generate([cases.PROMPT, "cut \ud83d"], max_new_tokens=3)
