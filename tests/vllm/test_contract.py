"""The vLLM engine does what every engine does."""

import pytest

from tests.engines.contract import EngineContract

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    with start(tiny_path, layers=[1, 2]) as engine:
        yield engine


class TestVLLMEngine(EngineContract):
    pass
