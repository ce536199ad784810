"""Rows of a call inside the server's engine: submitted beside everybody else's requests, and settled one by one."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from steerlab.core.errors import EngineError, InputError, ReceiptError, SteerlabError
from steerlab.engines.vllm._client.compiled_plan import CompiledPlan
from steerlab.engines.vllm._client.requests import Outcome, Request
from steerlab.engines.vllm._server.gateway import Gateway

_MORE_TRIES = 3
"""How often a row runs again whose edit was reached before its condition was answered."""
_DEAD = "vLLM's engine has died, so this server cannot answer; the requests under way are lost."


class RowNames:
    """What a row is called inside the engine, once it has been submitted."""

    def __init__(self) -> None:
        self.rows: list[str] = []


class RowRunner:
    """Runs the rows of calls; those of different calls share batches.

    Args:
        gateway: what rows go through.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._reading = asyncio.Lock()  # a pass has room for the positions that one wave reads

    async def run(self, requests: Sequence[Request], note: Callable[[], None]) -> list[Outcome]:
        """Runs rows; outcomes in their order. Cancelling it ends them inside the engine.

        Args:
            requests: the rows.
            note: called when one has ended.

        Raises:
            ReceiptError: if one could not be carried out as asked.
            EngineError: if the engine has died.
            InputError: for one that vLLM does not take.
        """
        plans = {r.compiled.fingerprint: r.compiled for r in requests if r.compiled is not None}
        held: list[CompiledPlan] = []
        try:
            for plan in plans.values():
                await self._gateway.plans.hold(plan)
                held.append(plan)
            if not any(request.read for request in requests):
                return await self._all(requests, note)
            async with self._reading:
                return await self._all(requests, note)
        except SteerlabError:
            raise
        except Exception as error:
            raise _explained(error) from error
        finally:
            for plan in held:
                self._gateway.in_background(self._gateway.plans.release(plan))

    async def _all(self, requests: Sequence[Request], note: Callable[[], None]) -> list[Outcome]:
        tasks = [asyncio.ensure_future(self._row(request, note)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _row(self, request: Request, note: Callable[[], None]) -> Outcome:
        outcome = await self._run(request)
        more = _MORE_TRIES if request.fits_one_pass(self._gateway.pass_tokens) else 0
        while outcome.came_early and more:  # others may have taken part of a pass
            outcome, more = await self._run(request), more - 1
        note()
        return outcome

    async def _run(self, request: Request) -> Outcome:
        name, names, settled = f"steerlab-{uuid4().hex}", RowNames(), False
        params = _params(request, name)
        self._gateway.accounts[name] = names
        outputs = self._gateway.generate({"type": "token", **request.prompt()}, params, name)
        last: Any = None
        try:
            async for output in outputs:
                last = output
            if not request.has_work:
                return Outcome(last)
            if params.stop:
                await self._gateway.stop(names.rows)
            found = await self._gateway.replies.settle(names.rows)
            settled = True
            outcome = found[names.rows[0]]
            if not outcome.ran:
                raise ReceiptError(f"Row {request.row_index}: no worker has an account of this request.")
            outcome.output = last
            return outcome
        finally:
            await outputs.aclose()
            if request.has_work and names.rows and not settled:
                await self._abandon(names.rows)
            self._gateway.accounts.pop(name, None)

    async def _abandon(self, rows: Sequence[str]) -> None:
        """Ends a row that nobody waits for, and has the workers forget it; a dead engine has nothing to forget."""
        try:
            await self._gateway.abandon(rows)
        except Exception as error:
            if not isinstance(_explained(error), EngineError | ReceiptError):
                raise


def _params(request: Request, name: str) -> Any:
    """VLLM's sampling parameters for a row."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    spec = request.spec(name)
    return SamplingParams(
        **request.arguments,
        seed=request.seed,
        extra_args=None if spec is None else spec.to_args(),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _explained(error: BaseException) -> SteerlabError:
    """One of our errors for whatever vLLM raised."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, SteerlabError):
        return error
    cause = error.__cause__ or error
    if isinstance(error, EngineDeadError) or isinstance(cause, EngineDeadError):
        return EngineError(_DEAD)
    if isinstance(cause, ValueError):  # vLLM's refusals are of this kind
        return InputError(f"vLLM does not take a row of this call: {cause}")
    return SteerlabError(f"vLLM failed on a row of this call: {type(cause).__name__}: {cause}")
