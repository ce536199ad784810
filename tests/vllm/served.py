"""A real `steerlab serve` in a process of its own, that can be killed and started again at the same address."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import torch

import steerlab as sl
from tests.vllm import forked
from tests.vllm.conftest import OPTIONS
from tests.vllm.ready import Program, start_ready

KEY = "open-sesame"
PLAIN = {"verify": False}
"""For httpx, whose every request would otherwise read the certificates of the web, for no use here."""
BLOCK = 32
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass
class Served:
    """A server's process and address.

    Attributes:
        model: what is served.
        options: of `steerlab serve`.
        log: what it prints.
        tokens_per_pass: that vLLM runs at most.
        port: where it listens.
        ready: whether its process has imported vLLM before it is told to serve, rather than started as by a command.
        process: it.
    """

    model: Path
    options: list[str]
    log: Path
    tokens_per_pass: int = 256
    port: int = field(default_factory=lambda: _free_port())
    ready: bool = False
    process: subprocess.Popen | Program | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        vllm_options = ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-num-seqs", "8"]
        vllm_options += ["--served-model-name", "tiny", "--api-key", KEY]
        vllm_options += ["--max-num-batched-tokens", str(self.tokens_per_pass)]
        vllm_options += ["--kv-cache-memory-bytes", str(OPTIONS["kv_cache_memory_bytes"])]
        arguments = ["serve", str(self.model), *self.options, "--port", str(self.port), "--", *vllm_options]
        environment = {**ENVIRONMENT, **forked.environment(Path(tempfile.mkdtemp(dir=self.log.parent)))}
        if self.ready:
            self.process = start_ready(_command, arguments, environment=environment, log=self.log)
        else:
            with self.log.open("a") as file:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", "from steerlab._cli import main; main()", *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                )
        if wait:
            self.wait()

    def wait(self) -> None:
        for _ in range(1200):
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", **PLAIN).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.25)
        raise AssertionError(f"The server did not start:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """As a machine does that fails: nothing is put away."""
        for one in self.processes():
            one.kill()
        self.process.wait(30)

    def end(self) -> None:
        if self.process.poll() is None:
            processes = self.processes()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                for one in processes:
                    one.kill()
                self.process.wait(30)

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [*main.children(recursive=True), main]

    def memory(self) -> int:
        """Bytes that the processes hold for themselves."""
        return sum(one.memory_full_info().uss for one in self.processes())

    def engine(self, **options) -> sl.RemoteEngine:
        return sl.RemoteEngine(self.url, api_key=KEY, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {KEY}"}, timeout=60, **PLAIN)

    def post(self, path: str, body) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=120, **PLAIN)


def _command(arguments: Sequence[str]) -> None:
    """`steerlab` with these arguments, in a process that has imported what it imports."""
    from steerlab._cli import main

    torch.compiler.set_stance("force_eager")
    sys.argv[1:] = arguments
    main()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
