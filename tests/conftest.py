import os
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
from jaxtyping import install_import_hook

# Before anything imports steerlab: check shapes and types of every call in the tests.
install_import_hook(["steerlab.measures", "steerlab.steering"], "beartype.beartype")

import torch
from hypothesis import settings

settings.register_profile("steerlab", deadline=None, derandomize=True)  # torch's first call is slow; CI must repeat
settings.load_profile("steerlab")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(min(4, len(os.sched_getaffinity(0))))


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
