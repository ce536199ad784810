import atexit
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

gc.disable()  # until the tests are collected: imports make no garbage to speak of
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
if "PYTEST_XDIST_WORKER" in os.environ:  # there is a process per core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest

# Before anything imports steerlab: shapes and types of every call are checked in the tests of `_CHECKED`.
jaxtyping.install_import_hook(["steerlab.measures", "steerlab.steering"], "tests.checked")

import torch
from hypothesis import settings

from tests.work_units import in_order_of_length, unit_of

if TYPE_CHECKING:
    from steerlab.engines.lens import LensEngine

settings.register_profile("steerlab", max_examples=50, deadline=None, derandomize=True)  # CI must repeat
settings.load_profile("steerlab")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or min(4, len(os.sched_getaffinity(0)))))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script: tests send interrupts
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
    yield from _engine(tiny_llama_path)


@pytest.fixture(scope="session")
def tiny_gpt2_engine(tiny_gpt2_path: Path) -> Iterator["LensEngine"]:
    yield from _engine(tiny_gpt2_path)


def _engine(path: Path) -> Iterator["LensEngine"]:
    from steerlab.engines.lens import load

    with load(path, device="cpu") as engine:
        yield engine


# --- checks of shapes and types -----------------------------------------------------------------------------------

_CHECKED = (
    "core",
    "engines",
    "measures",
    "runtime",
    "steering",
    "lens/test_engine.py",
    "lens/test_generation.py",
    "lens/test_hooked_generate.py",
    "sequences/test_forcing.py",
    "sequences/test_gradients.py",
)
"""Folders and files whose tests check types; the others call the same functions alike, ten thousands of times."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    jaxtyping.config.update("jaxtyping_disable", not file.startswith(_CHECKED))


@pytest.fixture
def unchecked_types() -> None:
    """Lets wrong types through to our own validation, as in a user's process."""
    jaxtyping.config.update("jaxtyping_disable", True)


# --- several processes (pytest -n 2) ------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    runs_vllm = [item.get_closest_marker("vllm") is not None for item in items]
    for item, runs in zip(items, runs_vllm, strict=True):
        if runs:
            item.user_properties.append((_RUNS_VLLM, True))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = [items[place] for place in in_order_of_length([item.nodeid for item in items], runs_vllm)]


def pytest_collection_finish() -> None:
    _spare_what_is_alive()
    atexit.register(gc.unfreeze)  # libraries call what is left at the end a leak
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:  # a file's fixtures are gone
        _spare_what_is_alive()


def _spare_what_is_alive() -> None:
    """Spares it the search for garbage, 0.3 s in all of torch and transformers, which closing an engine starts."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


# --- how many vLLM tests really ran -------------------------------------------------------------------------------

_RUNS_VLLM = "runs vLLM"
_vllm_tests_run: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.outcome in ("passed", "failed") and _RUNS_VLLM in dict(report.user_properties):
        _vllm_tests_run.add(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:  # not in workers: they have no terminal
    terminalreporter.write_line(f"vLLM tests run: {len(_vllm_tests_run)}")
    count_file = os.environ.get("STEERLAB_VLLM_COUNT_FILE")
    if count_file:
        Path(count_file).write_text(f"{len(_vllm_tests_run)}\n")
