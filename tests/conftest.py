import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import jaxtyping
import pytest

# Before anything imports steerlab: check shapes and types of every call in the tests.
jaxtyping.install_import_hook(["steerlab.measures", "steerlab.steering"], "tests.checked")

import torch
from hypothesis import settings

if TYPE_CHECKING:
    from steerlab.engines.lens import LensEngine

settings.register_profile("steerlab", deadline=None, derandomize=True)  # torch's first call is slow; CI must repeat
settings.load_profile("steerlab")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or min(4, len(os.sched_getaffinity(0)))))


# --- models -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real small model's directory."""
    from steerlab.models import resolve

    return resolve("smollm2-135m").path


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with chat template."""
    from tests.tiny_models import build_tiny_llama

    return build_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_gpt2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random GPT-2 without chat template."""
    from tests.tiny_models import build_tiny_gpt2

    return build_tiny_gpt2(tmp_path_factory.mktemp("tiny") / "gpt2")


@pytest.fixture(scope="session")
def lens_engine(smollm2_path: Path) -> Iterator["LensEngine"]:
    """The real small model on TransformerLens."""
    yield from _engine(smollm2_path)


@pytest.fixture(scope="session")
def tiny_llama_engine(tiny_llama_path: Path) -> Iterator["LensEngine"]:
    """The tiny Llama on TransformerLens."""
    yield from _engine(tiny_llama_path)


@pytest.fixture(scope="session")
def tiny_gpt2_engine(tiny_gpt2_path: Path) -> Iterator["LensEngine"]:
    """The tiny GPT-2 on TransformerLens."""
    yield from _engine(tiny_gpt2_path)


def _engine(path: Path) -> Iterator["LensEngine"]:
    from steerlab.engines.lens import load

    with load(path, device="cpu") as engine:
        yield engine


# --- what the type checks would catch first -----------------------------------------------------------------------


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Lets wrong types through to our own validation, as in a user's process."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- how many vLLM tests really ran -------------------------------------------------------------------------------

_vllm_tests: set[str] = set()
_vllm_tests_run: set[str] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _vllm_tests.update(item.nodeid for item in items if item.get_closest_marker("vllm"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.outcome in ("passed", "failed") and report.nodeid in _vllm_tests:
        _vllm_tests_run.add(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"vLLM tests run: {len(_vllm_tests_run)}")
    count_file = os.environ.get("STEERLAB_VLLM_COUNT_FILE")
    if count_file:
        Path(count_file).write_text(f"{len(_vllm_tests_run)}\n")
