import functools
import gc
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import steerlab as sl
from tests.tiny_models import build_tiny_llama
from tests.vllm import forked

WIDTH = 128
NAN_TOKEN, INF_TOKEN = 384, 385
"""Tokens that only `overflowing_path` has."""

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed; `make setup` installs it where that is possible",
)


def pytest_collection_modifyitems(items):
    """Tests that start an engine need vLLM."""
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(needs_vllm)


OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
"""Of a small engine."""

ASKED = json.loads(os.environ.get("STEERLAB_TEST_VLLM", "{}"))
"""What an environment asks of every engine, as `benchmarks/vllm_forms.py` does on a GPU."""


@contextmanager
def started(path, *, in_process=True, **arguments):
    """A small engine in float32; in this process it starts in a quarter of the time."""
    options = {**OPTIONS, **arguments, **ASKED}
    with (
        set_up_vllm(in_process=in_process, compiled=not options["enforce_eager"]),
        sl.load(path, backend="vllm", **options) as engine,
    ):
        yield engine
    _freeze_once()


@functools.cache
def _freeze_once():
    """Spares vLLM, which an engine has imported, the search for garbage, as `pytest_collection_finish` did the rest."""
    gc.collect()
    gc.freeze()


@contextmanager
def set_up_vllm(*, in_process, compiled=False):
    """What vLLM reads of its surroundings.

    Args:
        in_process: whether the engine runs in this process.
        compiled: whether functions are compiled that vLLM compiles, even of an engine that is eager, for seconds each.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as plugin,
        torch.compiler.set_stance("default" if compiled else "force_eager"),
    ):
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        # an engine looks for garbage seven times, through all that is alive: only what was imported is spared that
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(gc, "freeze", lambda: None)
        if in_process:  # threads that wait for each other cost more than they save on models this small
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            torch.set_num_threads(1)
            if "vllm" in sys.modules:  # the import belongs to the start of an engine, whose output is looked at
                # vLLM looks at an architecture that is new to it in a process of its own, which imports vLLM again
                patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())
                from vllm.triton_utils import dispatcher

                if dispatcher._registry:  # kernels for the CPU are in place, wherever an engine has searched for them
                    patch.setattr(dispatcher, "register_kernels", lambda overrides: None)
        else:
            for name, value in forked.environment(Path(plugin)).items():
                patch.setenv(name, value)
            patch.syspath_prepend(plugin)  # a spawned process has this one's path
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
        patch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")  # 20 s for those whose neighbour was killed
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def started_with_vllm():
    """A context in which a function makes a small `vllm.LLM` in this process, without our engine; they end with it."""

    @contextmanager
    def starting():
        made = []

        def make(path, **arguments):
            from vllm import LLM

            made.append(LLM(model=path, **{**OPTIONS, **arguments}))
            return made[-1]

        with set_up_vllm(in_process=True):
            yield make
            for llm in made:
                llm.llm_engine.engine_core.shutdown()
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    return starting


@pytest.fixture(scope="session")
def start():
    """Starts an engine, as a context."""
    return started


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A tiny Llama with the smallest heads that vLLM's CPU attention takes."""
    directory = tmp_path_factory.mktemp("vllm") / "llama"
    return build_tiny_llama(directory, context=512, hidden_size=WIDTH, intermediate_size=256)


@pytest.fixture(scope="session")
def overflowing_path(tiny_path, tmp_path_factory):
    """The tiny Llama with two more tokens, whose embeddings are NaN and infinite: plain prompts can overflow too."""
    directory = tmp_path_factory.mktemp("vllm") / "overflowing"
    shutil.copytree(tiny_path, directory)
    weights = load_file(directory / "model.safetensors")
    for name, rows in {"model.embed_tokens.weight": [math.nan, math.inf], "lm_head.weight": [0.0, 0.0]}.items():
        more = torch.tensor(rows)[:, None].expand(-1, WIDTH)
        weights[name] = torch.cat([weights[name], more]).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    assert config["vocab_size"] == NAN_TOKEN
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": NAN_TOKEN + 2}))
    return directory


@pytest.fixture(scope="session")
def lens(tiny_path):
    """The same model on TransformerLens."""
    with sl.load(tiny_path, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="session")
def vector():
    """Random vectors by layer and seed."""

    def make(layer, seed=0, site="resid_post"):
        values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 * layer + seed))
        return sl.SteeringVector.from_tensor(values, layer=layer, site=site)

    return make


@pytest.fixture
def seen(engine, monkeypatch):
    """The outcomes of every call, in order."""
    found = []
    original = engine._run

    def recording(*args, **kwargs):
        found.append(original(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(engine, "_run", recording)
    return found
