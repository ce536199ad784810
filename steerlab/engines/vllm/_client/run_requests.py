"""Runs the requests of a call: sends plans to the workers and requests to vLLM, and collects what happened to each."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from typing_extensions import override

from steerlab.core.errors import EngineError, ReceiptError
from steerlab.core.token_sets import TokenSets
from steerlab.engines.vllm._client.compiled_plan import CompiledPlan
from steerlab.engines.vllm._client.connection import Connection
from steerlab.engines.vllm._client.interrupts import DeferredInterrupt
from steerlab.engines.vllm._client.requests import Outcome, Request
from steerlab.engines.vllm._wire.packets import Answer
from steerlab.engines.vllm._wire.request_spec import Group
from steerlab.engines.vllm._wire.worker_reply import WorkerReply

_numbers = itertools.count()
WAITS_FOR = 0.5
"""How much of a pass the first requests of a call must fill before it begins."""


def run_requests(
    connection: Connection, requests: Sequence[Request], what: str, *, together: bool = False
) -> list[Outcome]:
    """Runs all requests in one go; outcomes in their order. A call of another thread waits: vLLM's client takes one.

    Args:
        connection: the engine.
        requests: what to run.
        what: names the call.
        together: whether the first ones wait until there are enough of them to fill a pass.

    Raises:
        ReceiptError: if a worker could not do what a request asked for.
        SteerlabError: if a worker dies.
    """
    if not requests:
        return []
    names = [f"{next(_numbers)}" for _ in requests]
    plans = {request.compiled.fingerprint: request.compiled for request in requests if request.compiled is not None}
    n_first = first_pass(requests, *connection.pass_size) if together else 0
    group = (names[0], sum(request.has_work for request in requests[:n_first]))  # others name no group
    rows = [(*row, group if i < n_first else None) for i, row in enumerate(_named(requests, names))]
    with connection.one_call(), DeferredInterrupt() as interrupts:
        params = _Params(interrupts.check)
        prompts = _Lazy(lambda request: request.prompt(), requests)
        try:
            _send_plans(connection, plans)
            outputs = connection.run(prompts, _Lazy(lambda row: params(*row), rows), what, interrupts.check)
            outcomes = _collect(connection, requests, names, outputs)
        except EngineError:  # the engine is gone: there is nothing to clean up
            raise
        except BaseException:
            _clean_up(connection, names, interrupts)
            raise
    if len(requests) > 1:
        _repeat_early_ones(connection, requests, outcomes, what)
    return outcomes


def _repeat_early_ones(connection: Connection, requests: Sequence[Request], outcomes: list[Outcome], what: str) -> None:
    """Runs those requests alone whose prompts were cut because others took part of a pass.

    An edit may so have been reached before its condition was answered. Ends with the first that comes early again, for
    which no pass is large enough, or the probe comes after the edit.
    """
    for index, request in enumerate(requests):
        if outcomes[index].came_early and request.fits_one_pass(connection.pass_size[0]):
            (outcomes[index],) = run_requests(connection, [request], what)
            if outcomes[index].came_early:
                return


def _clean_up(connection: Connection, names: Sequence[str], interrupts: DeferredInterrupt) -> None:
    """Leaves an engine that the next call can use, or one that says why it cannot."""
    try:
        if not interrupts.is_torn:
            connection.abandon(names)
    finally:
        if interrupts.is_torn:
            connection.give_up()


def first_pass(requests: Sequence[Request], n_tokens: int, n_requests: int) -> int:
    """How many of the requests the first pass waits for; tokens that requests share are run once.

    Args:
        requests: in the order in which they are submitted.
        n_tokens: that a pass holds at most.
        n_requests: that a pass holds at most.
    """
    begun: set[str] = set()
    total = 0
    for index, request in enumerate(requests[:n_requests]):
        if total >= WAITS_FOR * n_tokens:
            return index
        name, n_shared = request.prefix or ("", 0)
        total += request.n_tokens - (n_shared if name in begun else 0)
        begun.add(name)
    return min(len(requests), n_requests)


class _Lazy(Sequence[Any]):
    """Items that are made when they are asked for, so that the first runs while the next ones are being made.

    Args:
        make: makes one.
        items: what from.
    """

    def __init__(self, make: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._make, self._items = make, items

    @override
    def __len__(self) -> int:
        return len(self._items)

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._make(self._items[index])


def _named(requests: Sequence[Request], names: Sequence[str]) -> Any:
    return zip(requests, names, strict=True)


class _Params:
    """VLLM's sampling parameters for the requests of a call. Validation is slow, so equal ones are validated once.

    Args:
        check: called before each request is submitted.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        from vllm import SamplingParams  # once: vLLM looks a name up anew each time that it is imported

        self._class, self._check = SamplingParams, check
        self._checked: dict[int, Any] = {}

    def __call__(self, request: Request, name: str, group: Group | None) -> Any:
        """Those of one request, named by its row; an interrupt that has waited comes through here."""
        self._check()
        key = id(request.arguments)
        if key not in self._checked:
            # each is made for one request alone, so vLLM need not copy it in depth
            self._checked[key] = self._class(**request.arguments, seed=request.seed, skip_clone=True)
        spec = request.spec(name, group)
        params = copy(self._checked[key])
        params.seed = request.seed
        params.extra_args = None if spec is None else spec.to_args()
        return params


def _send_plans(connection: Connection, plans: Mapping[str, CompiledPlan]) -> None:
    """Sends the workers the vectors of plans that they do not hold yet."""
    missing, dropped = connection.plans.take(plans)
    try:
        if dropped:
            connection.ask("drop", dropped)
        if missing:
            connection.ask("hold", *plans_message(missing))
    except BaseException:
        connection.plans.lose(missing)
        raise


def plans_message(plans: Mapping[str, CompiledPlan]) -> tuple[list[str], dict[str, np.ndarray]]:
    """What the command `hold` takes: the plans' fingerprints, and their tables."""
    arrays: dict[str, np.ndarray] = {}
    for name, plan in plans.items():
        arrays |= plan.tables.arrays(name)
    return list(plans), arrays


def _collect(
    connection: Connection, requests: Sequence[Request], names: Sequence[str], outputs: Sequence[Any]
) -> list[Outcome]:
    outcomes = [Outcome(output) for output in outputs]
    wanted = [name for request, name in _named(requests, names) if request.has_work]
    if not wanted:
        return outcomes
    by_name = dict(zip(names, outcomes, strict=True))
    read_replies(by_name, connection.ask("settle", wanted))
    for request, name in _named(requests, names):
        if request.has_work and not by_name[name].ran:
            raise ReceiptError(f"Row {request.row_index}: no worker has an account of this request.")
    return outcomes


def read_replies(by_name: Mapping[str, Outcome], answers: Sequence[Answer]) -> None:
    """Adds every worker's answer to `settle` to the outcomes of the rows it names; other rows are left out.

    Raises:
        ReceiptError: if a row could not be carried out as asked, or ranks disagree.
    """
    replies = [WorkerReply(*answer) for answer in answers]
    for reply in replies:
        if reply.header["tp"] == 0:
            mine = [row for row in reply.header["rows"] if row in by_name]
            _check_ranks_agree(reply, [other for other in replies if other.header["pp"] == reply.header["pp"]], mine)
            for row in mine:
                _add(reply, row, by_name[row])


def _add(reply: WorkerReply, row: str, outcome: Outcome) -> None:
    if row in reply.header["problems"]:
        problem = reply.header["problems"][row]
        raise ReceiptError(f"A request could not be carried out as asked: {problem}.")
    outcome.ran = list(map(tuple, reply.of("ran", row).tolist()))
    outcome.tally |= zip(reply.of("edits", row).tolist(), map(tuple, reply.of("tally", row).tolist()), strict=True)
    answers = reply.of("answers", row)
    if len(answers):
        outcome.answers = answers
    outcome.read = reply.of("read", row).tolist()
    streams = reply.array("streams", row)
    if streams is not None:
        outcome.streams |= dict(zip(reply.header["points"], streams, strict=True))
    at = reply.of("at", row)
    if len(at):  # of pipeline stages only the last one measures
        outcome.at, outcome.measured = at, reply.of("measured", row).reshape(-1, len(at))
        outcome.distribution = reply.array("distribution", row)
        supports = reply.array("supports", row)
        outcome.supports = None if supports is None else TokenSets.from_bytes(supports.tobytes())


def _check_ranks_agree(first: WorkerReply, others: Sequence[WorkerReply], rows: Sequence[str]) -> None:
    """Tensor-parallel ranks of one stage must have edited the same tokens, and measured the same."""
    for other in others:
        if other is first:
            continue
        differing = [row for row in rows if other.edited(row) != first.edited(row)]
        if differing:
            row = differing[0]
            raise ReceiptError(
                f"Tensor-parallel ranks {first.header['tp']} and {other.header['tp']} edited different tokens of a "
                f"request: {first.edited(row)} and {other.edited(row)}."
            )
        if not all(first.measured_like(other, row) for row in rows):
            raise ReceiptError(
                f"Tensor-parallel ranks {first.header['tp']} and {other.header['tp']} measured different values of the "
                "same predictions. They hold different streams or logits; the scores cannot be trusted."
            )
