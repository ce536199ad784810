"""The TransformerLens engine does what every engine does."""

import pytest

from tests.engines.contract import EngineContract


@pytest.fixture(scope="module")
def engine(tiny_llama_engine):
    return tiny_llama_engine


class TestLensEngine(EngineContract):
    pass
