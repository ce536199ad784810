"""Calls by the id that a client gave them: one that is sent twice is carried out once."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from steerlab.core.errors import InputError
from steerlab.engines.vllm._server.calls import Call

KEPT_BYTES = 64 << 20
"""Bytes of answers that are kept for a client that asks again because it did not get one."""

KEPT_ANSWERS = 1024

THREADS = 64
"""Calls that work at the same time; others wait for their turn."""


@dataclass
class Job:
    """A call under way, and how many connections wait for it.

    Attributes:
        name: the id.
        digest: of what was sent.
        call: the call.
        task: ends with its answer.
        n_waiting: connections.
    """

    name: str
    digest: str
    call: Call
    task: "asyncio.Future[bytes]"
    n_waiting: int = 0


class CallBook:
    """Calls under way, and the last answers.

    Args:
        kept_bytes: of answers.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._pool, self._room = ThreadPoolExecutor(THREADS, thread_name_prefix="steerlab-call"), kept_bytes
        self._jobs: dict[str, Job] = {}
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self.n_bytes = 0

    def kept(self, name: str, body: bytes) -> bytes | None:
        """The answer to a call that has ended; None if there is none.

        Raises:
            InputError: if another call had this id.
        """
        found = self._kept.get(name)
        if found is not None:
            _require_same(name, found[0], body)
        return None if found is None else found[1]

    def join(self, name: str, body: bytes, make: Callable[[], Call]) -> Job:
        """The call under way with this id, or a new one; each `join` is followed by a `leave`.

        Raises:
            InputError: if another call has this id.
        """
        job = self._jobs.get(name)
        if job is None:
            call = make()
            task = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._pool, call.answer))
            job = self._jobs[name] = Job(name, _digest(body), call, task)
            task.add_done_callback(lambda _: self._ended(job))
        _require_same(name, job.digest, body)
        job.n_waiting += 1
        return job

    def leave(self, job: Job) -> None:
        """One connection no longer waits; a call that nobody waits for is cancelled."""
        job.n_waiting -= 1
        if job.n_waiting == 0 and not job.task.done():
            self._jobs.pop(job.name, None)
            job.call.cancel()

    def close(self) -> None:
        """Cancels all calls."""
        for job in list(self._jobs.values()):
            job.call.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, job: Job) -> None:
        if self._jobs.get(job.name) is job:
            del self._jobs[job.name]
        failed = job.task.cancelled() or job.task.exception() is not None
        if failed or job.call.plain:
            return
        answer = job.task.result()
        if len(answer) > self._room:
            return
        self._kept[job.name] = (job.digest, answer)
        self.n_bytes += len(answer)
        while self.n_bytes > self._room or len(self._kept) > KEPT_ANSWERS:
            _, (_, oldest) = self._kept.popitem(last=False)
            self.n_bytes -= len(oldest)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _require_same(name: str, digest: str, body: bytes) -> None:
    if digest != _digest(body):
        raise InputError(f"The id {name[:80]!r} has been given to another call; an id stands for one.")
