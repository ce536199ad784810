"""The workers, asked without blocking the server: plans they hold, records they hand over."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from steerlab.engines.vllm._client.compiled_plan import CompiledPlan
from steerlab.engines.vllm._client.plan_cache import PlanCache
from steerlab.engines.vllm._client.requests import Outcome
from steerlab.engines.vllm._client.run_requests import plans_message, read_replies
from steerlab.engines.vllm._wire.packets import METHOD, Answer, command, unpack_answers

IDLE_PLANS = 256
"""Plans that the workers keep although no request uses them now."""


class AsyncEngine(Protocol):
    """What the server uses of vLLM's AsyncLLM."""

    vllm_config: Any
    engine_core: Any
    generate: Callable[..., AsyncGenerator[Any]]
    abort: Callable[..., Any]

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[bytes]:
        """Calls a method of every worker."""
        ...

    async def reset_prefix_cache(self) -> Any:
        """Forgets all cached blocks."""
        ...


class Workers:
    """Sends commands to every worker.

    Args:
        engine: vLLM's AsyncLLM.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def ask(self, name: str, header: Any = None, arrays: Mapping[str, np.ndarray] | None = None) -> list[Answer]:
        """Their answers in order of rank."""
        return unpack_answers(await self._engine.collective_rpc(METHOD, args=command(name, header, arrays)))


class SharedPlans:
    """The plans that the workers hold for requests that run at the same time: those in use, and the latest others.

    Args:
        workers: who holds them.
        idle: how many of the others.
    """

    def __init__(self, workers: Workers, idle: int = IDLE_PLANS) -> None:
        self._workers, self._idle = workers, idle
        self._cache = PlanCache(size=_one)
        self._users: Counter[str] = Counter()
        self._sending: dict[str, asyncio.Task[Any]] = {}
        self._in_order = asyncio.Lock()  # a plan that is dropped and wanted again must arrive after the drop

    async def hold(self, plan: CompiledPlan) -> None:
        """Returns when every worker holds a plan; they do so until `release`."""
        name = plan.fingerprint
        if self._cache.add({name: plan}):
            self._sending[name] = asyncio.ensure_future(self._send(plan))
        sending = self._sending[name]
        self._users[name] += 1
        try:
            await asyncio.shield(sending)
        except BaseException:
            self._users[name] -= 1
            if sending.done() and self._sending.get(name) is sending:
                self._cache.lose([name])
                del self._sending[name]
            raise

    async def release(self, plan: CompiledPlan) -> None:
        """Ends one use of a plan; the oldest unused are dropped."""
        self._users[plan.fingerprint] -= 1
        self._users = +self._users  # those with any
        dropped = self._cache.drop(self._users, self._idle)
        for name in dropped:
            del self._sending[name]
        if dropped:
            async with self._in_order:
                await self._workers.ask("drop", dropped)

    async def _send(self, plan: CompiledPlan) -> None:
        async with self._in_order:
            await self._workers.ask("hold", *plans_message({plan.fingerprint: plan}))


def _one(_: CompiledPlan) -> int:
    return 1


class ReplyCollector:
    """Asks the workers what happened to requests that have ended; all that end while a question is out share the next.

    Args:
        workers: who know.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._waiting: list[tuple[list[str], asyncio.Future[dict[str, Outcome]]]] = []
        self._asking: asyncio.Task[None] | None = None

    async def settle(self, rows: Sequence[str]) -> dict[str, Outcome]:
        """What happened to some rows.

        Raises:
            ReceiptError: if one of them could not be carried out as asked.
        """
        answer: asyncio.Future[dict[str, Outcome]] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(rows), answer))
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await answer

    async def _ask(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                answers = await self._workers.ask("settle", [row for rows, _ in batch for row in rows])
            except Exception as error:
                for _, answer in batch:
                    _give(answer, error)
                continue
            for rows, answer in batch:
                _give(answer, _outcomes(rows, answers))


def _outcomes(rows: Sequence[str], answers: Sequence[Answer]) -> Any:
    """Outcomes by row, or what was wrong with one of these rows."""
    found = {row: Outcome(None) for row in rows}
    try:
        read_replies(found, answers)
    except Exception as error:
        return error
    return found


def _give(answer: "asyncio.Future[Any]", found: Any) -> None:
    if answer.done():  # its request was cancelled
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)
