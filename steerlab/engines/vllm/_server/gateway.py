"""Where steered requests enter vLLM's engine and leave it.

Wraps two methods of the server's AsyncLLM, on the instance: `generate`, which sees a request's tokens before it is
submitted, and its engine client's `add_request_async`, which sees each of its samples under the name it runs by.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from steerlab.core._not_finite_errors import not_finite
from steerlab.core.errors import InputError, PromptError, SteerlabError
from steerlab.engines.vllm._client.build_receipts import inherited_of, receipt_of
from steerlab.engines.vllm._client.position_runs import Row
from steerlab.engines.vllm._client.ready_plans import ReadyPlan
from steerlab.engines.vllm._server.claims import Claim, with_spec
from steerlab.engines.vllm._server.plans import PlanMaker
from steerlab.engines.vllm._server.tickets import ReceiptBook, Ticket, receipt_json
from steerlab.engines.vllm._server.workers import AsyncEngine, ReplyCollector, SharedPlans, Workers
from steerlab.engines.vllm._wire.config import KEY
from steerlab.engines.vllm._wire.request_spec import RequestSpec
from steerlab.steering.positions._prompt_lookup import PromptContent

FIELD = "steering"


class Gateway:
    """Hands steered requests to the engine, and takes their receipts.

    Args:
        engine: vLLM's AsyncLLM; its methods are wrapped.
        maker: makes plans; None in a server that does not steer, which refuses whatever asks for it.
        tokenizer: the model's own; None if text cannot be looked at.

    Attributes:
        book: receipts of requests that have ended.
        plans: what the workers hold.
        replies: what the workers say of rows that have ended.
        accounts: rows inside the engine by the name that they are submitted under; each notes in `rows` what the engine
            calls it.
        generate: vLLM's own `generate`.
    """

    def __init__(self, engine: AsyncEngine, maker: PlanMaker | None, tokenizer: Any = None) -> None:
        self.maker, self.book = maker, ReceiptBook()
        self.workers = Workers(engine)
        self._tokenizer = tokenizer
        self._engine = engine
        self.plans, self.replies = SharedPlans(self.workers), ReplyCollector(self.workers)
        self._tickets: dict[str, Ticket] = {}
        self.accounts: dict[str, Claim | Any] = {}
        self._leftover: set[asyncio.Task[None]] = set()
        self.generate, self._submit = engine.generate, engine.engine_core.add_request_async
        engine.generate = self._wrapped_generate
        engine.engine_core.add_request_async = self._wrapped_submit

    @property
    def pass_tokens(self) -> int:
        """How many tokens a pass holds at most."""
        return self._engine.vllm_config.scheduler_config.max_num_batched_tokens

    def issue(self, ready: ReadyPlan, name: str | None = None) -> Ticket:
        """A ticket for a request that will run under a plan."""
        ticket = Ticket(ready, "")
        ticket.name = ticket.id if name is None else name
        self._tickets[ticket.id] = ticket
        return ticket

    def retire(self, ticket: Ticket) -> None:
        """Ends a ticket: nothing more can enter the engine with it."""
        self._tickets.pop(ticket.id, None)

    def _wrapped_generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        """Replaces `AsyncLLM.generate`; a request without steering gets vLLM's own generator."""
        arguments = getattr(sampling_params, "extra_args", None) or {}
        if KEY not in arguments and FIELD not in arguments:
            return self.generate(prompt, sampling_params, request_id, **options)
        ticket = self._tickets.get(str(arguments.get(KEY)))
        if ticket is None or FIELD in arguments:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError("Steering can be asked for on /v1/completions and /v1/chat/completions only.")
        index, ticket.n_prompts = ticket.n_prompts, ticket.n_prompts + 1
        return self._steered(ticket, index, prompt, sampling_params, request_id, options)

    async def _steered(
        self, ticket: Ticket, index: int, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncIterator[Any]:
        try:
            claim = self._claim(ticket, index, prompt, params, request_id)
        except SteerlabError as error:
            ticket.problem = error
            raise
        ticket.reached = True
        await self.plans.hold(ticket.compiled)
        self.accounts[claim.key] = claim
        outputs = self.generate(prompt, claim.marked(params), request_id, **options)
        try:
            async for output in outputs:
                claim.tokens.add(output)
                failed = any(sample.finish_reason == "error" for sample in output.outputs)
                if output.finished:
                    await self._settle(claim, failed=failed)
                if failed:
                    assert self.maker is not None
                    ticket.problem = not_finite(f"The logits of prompt {index}", self.maker.info.dtype, steered=True)
                    raise ticket.problem
                yield output
        finally:
            await outputs.aclose()
            self.in_background(self._end(claim))

    def _claim(self, ticket: Ticket, index: int, prompt: Any, params: Any, request_id: str) -> Claim:
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if ids is None:
            raise PromptError("steering needs a prompt of text or tokens; prompt embeddings have no positions to name.")
        assert self.maker is not None
        context = self.maker.info.context_length
        room = context - len(ids) if params.max_tokens is None else params.max_tokens
        row = Row(
            token_ids=tuple(ids),
            prompt_len=len(ids),
            length=min(len(ids) + room, context),
            content=PromptContent(0, 1, tuple(ids), None, self._tokenizer),
        )
        try:
            groups = self.maker.planner().positions(ticket.compiled, row)
        except SteerlabError as error:
            raise InputError(f"steering: {error}") from error
        return Claim(ticket, index, tuple(ids), groups, f"{ticket.id}/{request_id}", params)

    async def _wrapped_submit(self, request: Any) -> Any:
        """Replaces the engine client's `add_request_async`: each sample of a request has an account of its own."""
        params = request.sampling_params
        spec = RequestSpec.of(params)
        if spec is not None:
            self.accounts[spec.row].rows.append(request.request_id)
            request.sampling_params = with_spec(params, replace(spec, row=request.request_id))
        return await self._submit(request)

    async def _settle(self, claim: Claim, *, failed: bool = False) -> None:
        """Takes and checks the receipts of a request whose samples have all ended.

        Args:
            claim: the request's.
            failed: whether a sample ended because its logits were not finite; how far each ran is then what ran.

        Raises:
            ReceiptError: if an edit reached other positions than the plan implies.
        """
        if claim.may_run_on:
            await self.stop(claim.rows)
        outcomes = await self.replies.settle(claim.rows)
        claim.settled = True
        for sample, row in enumerate(claim.rows):
            request, length = claim.request(sample), claim.length(sample)
            outcomes[row].sampled = claim.tokens.of(sample)
            if failed:
                length = min(length, outcomes[row].end)
            receipt = receipt_of(request, outcomes[row], length)
            inherited = inherited_of(request, outcomes[row], length)
            claim.ticket.receipts.append(receipt_json(receipt, claim.index, inherited.positions))
        self.book.enter(claim.ticket)

    async def stop(self, rows: Sequence[str]) -> None:
        """Makes sure that no pass of some rows follows: an account is closed after the last one."""
        if rows:
            await self._engine.engine_core.abort_requests_async(list(rows))

    async def abandon(self, rows: Sequence[str]) -> None:
        """Ends rows that nobody waits for, and has the workers forget them."""
        await self._engine.abort(list(rows), internal=True)
        await self.stop(rows)  # also those that had not been taken up yet
        await self.replies.settle(rows)

    async def _end(self, claim: Claim) -> None:
        """Frees what a request held, also if it was broken off."""
        try:
            if claim.rows and not claim.settled:
                await self.stop(claim.rows)
                await self.replies.settle(claim.rows)
        finally:
            self.accounts.pop(claim.key, None)
            await self.plans.release(claim.ticket.compiled)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._leftover.add(task)
        task.add_done_callback(self._leftover.discard)
        task.add_done_callback(_note_failure)


def _note_failure(task: "asyncio.Task[None]") -> None:
    """A dead engine says so itself; no caller is left to hear it."""
    if not task.cancelled():
        task.exception()
