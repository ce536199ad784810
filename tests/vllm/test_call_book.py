"""Calls by their ids: one that is sent twice runs once, and one that nobody waits for is cancelled."""

import asyncio
import threading

import pytest

from steerlab.core.errors import InputError
from steerlab.engines.vllm._server.call_book import CallBook
from steerlab.engines.vllm._server.calls import CallCancelled


class Work:
    """A call that runs until it is let go, or cancelled."""

    plain = False

    def __init__(self, answer=b"answer"):
        self.free, self.cancelled, self.runs = threading.Event(), False, 0
        self._answer = answer

    def answer(self):
        self.runs += 1
        assert self.free.wait(10)
        if self.cancelled:
            raise CallCancelled
        return self._answer

    def cancel(self):
        self.cancelled = True
        self.free.set()


def run(scenario):
    async def whole():
        book = CallBook(kept_bytes=20)
        try:
            await scenario(book)
        finally:
            book.close()

    asyncio.run(whole())


def test_two_connections_share_one_call_and_a_third_finds_the_answer():
    async def scenario(book):
        work = Work()
        jobs = [book.join("a", b"body", lambda: work) for _ in range(2)]
        assert jobs[0] is jobs[1]
        book.leave(jobs[0])
        assert not work.cancelled
        work.free.set()
        assert await jobs[1].task == b"answer"
        book.leave(jobs[1])
        assert (work.runs, book.kept("a", b"body")) == (1, b"answer")
        assert book.kept("b", b"body") is None

    run(scenario)


def test_an_id_stands_for_one_call():
    async def scenario(book):
        work = Work()
        job = book.join("a", b"body", lambda: work)
        with pytest.raises(InputError, match="another call"):
            book.join("a", b"other", lambda: work)
        work.free.set()
        await job.task
        with pytest.raises(InputError, match="another call"):
            book.kept("a", b"other")

    run(scenario)


def test_a_call_that_nobody_waits_for_is_cancelled_and_may_come_again():
    async def scenario(book):
        first, second = Work(), Work()
        book.leave(book.join("a", b"body", lambda: first))
        assert first.cancelled
        second.free.set()
        job = book.join("a", b"body", lambda: second)
        assert await job.task == b"answer"
        assert (first.runs <= 1, second.runs) == (True, 1)
        assert book.kept("a", b"body") == b"answer"

    run(scenario)


def test_answers_are_kept_within_their_room():
    async def scenario(book):
        for name, answer in {"a": b"x" * 8, "b": b"y" * 8, "c": b"z" * 8, "d": b"w" * 21}.items():
            work = Work(answer)
            work.free.set()
            assert await book.join(name, b"", lambda work=work: work).task == answer
        await asyncio.sleep(0)
        assert [book.kept(name, b"") is not None for name in "abcd"] == [False, True, True, False]
        assert book.n_bytes == 16

    run(scenario)
