"""The workers, asked without blocking the server: plans they hold, accounts they hand over."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steerlab.engines.vllm.client.compiled_plan import CompiledPlan
from steerlab.engines.vllm.client.requests import Outcome
from steerlab.engines.vllm.client.run_requests import enter_accounts, holding
from steerlab.engines.vllm.wire.packets import pack, unpack

IDLE_PLANS = 256
"""Plans that the workers keep although no request uses them now."""


class Workers:
    """Sends commands to every worker.

    Args:
        engine: vLLM's AsyncLLM.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def ask(
        self, command: str, header: Any = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> list[tuple[Any, dict[str, np.ndarray]]]:
        """Their answers in order of rank."""
        answers = await self._engine.collective_rpc("steerlab", args=(command, pack(header, arrays)))
        return [unpack(answer) if answer else (None, {}) for answer in answers]


@dataclass
class _Held:
    sending: "asyncio.Task[Any]"
    users: int = 0


class HeldPlans:
    """Which plans the workers hold: those in use, and the most recent of the others.

    Args:
        workers: who holds them.
        idle: how many of the others.
    """

    def __init__(self, workers: Workers, idle: int = IDLE_PLANS) -> None:
        self._workers, self._idle = workers, idle
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._in_order = asyncio.Lock()  # a plan that is dropped and wanted again must arrive after the drop

    async def hold(self, plan: CompiledPlan) -> None:
        """Sees to it that every worker holds a plan until `release`."""
        name = plan.fingerprint
        if name not in self._held:
            self._held[name] = _Held(asyncio.ensure_future(self._send(plan)))
        held = self._held[name]
        self._held.move_to_end(name)
        held.users += 1
        try:
            await asyncio.shield(held.sending)
        except BaseException:
            held.users -= 1
            if held.sending.done() and self._held.get(name) is held:
                del self._held[name]
            raise

    async def release(self, plan: CompiledPlan) -> None:
        """Ends one use of a plan; the oldest that nobody uses are dropped."""
        self._held[plan.fingerprint].users -= 1
        idle = [name for name, held in self._held.items() if not held.users]
        dropped = idle[: max(0, len(idle) - self._idle)]
        for name in dropped:
            del self._held[name]
        if dropped:
            async with self._in_order:
                await self._workers.ask("drop", dropped)

    async def _send(self, plan: CompiledPlan) -> None:
        async with self._in_order:
            await self._workers.ask("hold", *holding({plan.fingerprint: plan}))


class Settler:
    """Asks the workers for the accounts of requests that have ended: all that end while one question is out, in one.

    Args:
        workers: who keeps them.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._waiting: list[tuple[list[str], asyncio.Future[dict[str, Outcome]]]] = []
        self._asking: asyncio.Task[None] | None = None

    async def settle(self, rows: Sequence[str]) -> dict[str, Outcome]:
        """The accounts of some rows.

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


def _outcomes(rows: Sequence[str], answers: Sequence[tuple[Any, dict[str, np.ndarray]]]) -> Any:
    """Outcomes by row, or what was wrong with one of these rows."""
    found = {row: Outcome(None) for row in rows}
    try:
        enter_accounts(found, answers)
    except Exception as error:
        return error
    return found


def _give(answer: "asyncio.Future[Any]", found: Any) -> None:
    if answer.done():  # nobody waits for it any more
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)
