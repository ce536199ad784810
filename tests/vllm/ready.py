"""Functions run in processes that have imported vLLM: all are forked from one that has done so once.

vLLM's import alone takes longer than most of what a test asks of it. The one that is forked runs nothing else, and what
runs is a process as any other: with its own signals, standard streams and children, and the end of an interpreter.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm import forked

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.ray_utils",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "torch._inductor.compile_fx",
    "datasets",
    "steerlab.engines.vllm._server.serve",
    "tests.vllm.conftest",
)
"""What an engine, its workers, a server or a test imports; what these import by themselves comes with them."""


@dataclass
class Program:
    """A function that runs in a process of its own, as `subprocess.Popen` has a command.

    Attributes:
        pid: the process.
        value: what the function has returned.
        returncode: how the process has ended; None while it runs.
    """

    pid: int
    _messages: Connection
    value: Any = None
    returncode: int | None = None

    def poll(self) -> int | None:
        """How the process has ended; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process.

        Raises:
            subprocess.TimeoutExpired: if nothing is heard of it for so many seconds.
        """
        while self.returncode is None:
            if not self._messages.poll(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            kind, content = pickle.loads(self._messages.recv_bytes())
            if kind == "value":
                self.value = content
            else:
                self.returncode = content
                self._messages.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_ready(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str], log: Path) -> Program:
    """Starts a function of a module that can be imported, in a process that leads a session.

    Args:
        function: what runs.
        arguments: of the function.
        environment: the process's.
        log: gets what it prints.
    """
    mine, theirs = Pipe()
    socket.send_fds(_ready(), [b"-"], [theirs.fileno()])
    theirs.close()
    surroundings = {**os.environ, forked.ASKED_BY: str(os.getpid()), **environment}
    mine.send_bytes(pickle.dumps((function, arguments, surroundings, log)))
    return Program(pickle.loads(mine.recv_bytes()), mine)


@functools.cache
def _ready() -> socket.socket:
    """Where the process listens that is forked; it ends with this one."""
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", forked.ASKED_BY: str(os.getpid())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def main(channel: int) -> None:
    """Imports vLLM, and forks whenever a connection comes."""
    gc.disable()
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.simple_compile_backend = "eager"  # of vLLM's own functions; C++ takes seconds to compile
    for module in IMPORTED:
        importlib.import_module(module)
    importlib.import_module("setproctitle").getproctitle()  # it finds the title where the environment begins, once
    gc.freeze()  # what was imported is searched for garbage by no child, which would copy it
    gc.enable()
    with socket.socket(fileno=channel) as requests:
        while True:
            _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not descriptors:
                os._exit(0)
            if not os.fork():
                break
            os.close(descriptors[0])
    _run(Connection(descriptors[0]))


def _run(messages: Connection) -> None:
    """Forks once more, waits for what runs there, and says how it ended; returns where the function has."""
    function, arguments, environment, log = pickle.loads(messages.recv_bytes())
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        messages.send_bytes(pickle.dumps(("ended", os.waitstatus_to_exitcode(status))))
        os._exit(0)
    os.setsid()
    messages.send_bytes(pickle.dumps(os.getpid()))
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(written, number)
    os.close(written)
    messages.send_bytes(pickle.dumps(("value", function(*arguments))))
