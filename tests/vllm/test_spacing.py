"""Tokenizers that put a space before every text."""

import pytest

from tests import spacing_cases as cases

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_completions_stop_strings_and_scores(start, tmp_path):
    path = cases.build(tmp_path / "llama2")
    with start(path, layers=[0]) as engine:
        cases.check_texts(engine)
        cases.check_scores(engine, path)
