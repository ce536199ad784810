"""A call's requests, carried out: plans to the workers, requests to vLLM, accounts back."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from typing_extensions import override

from steerlab.core.errors import EngineError, ReceiptError
from steerlab.engines.vllm.client.compiled_plan import CompiledPlan
from steerlab.engines.vllm.client.connection import Client
from steerlab.engines.vllm.client.interrupts import PutOff
from steerlab.engines.vllm.client.requests import Outcome, Request
from steerlab.engines.vllm.wire.request_spec import Group

_numbers = itertools.count()
_PARTS = ("ran", "edits", "tally", "read", "at", "measured")
_RANKS_APART = 1e-5
"""By how much ranks may differ in what each computes from the same logits, in nats."""
WAITS_FOR = 0.5
"""How much of a pass the first requests of a call must fill before it begins."""


def carry_out(client: Client, requests: Sequence[Request], what: str, *, together: bool = False) -> list[Outcome]:
    """Runs all requests in one go; outcomes in their order. A call of another thread waits: vLLM's client bears one.

    Args:
        client: the engine.
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
    n_first = first_pass(requests, *client.pass_size) if together else 0
    group = (names[0], sum(request.has_work for request in requests[:n_first]))  # others do not say what they belong to
    rows = [(*row, group if i < n_first else None) for i, row in enumerate(_named(requests, names))]
    with client.one_call(), PutOff() as interrupts:
        params = _Params(interrupts.check)
        prompts = _Lazy(lambda request: request.prompt(), requests)
        try:
            _hold(client, plans)
            outputs = client.run(prompts, _Lazy(lambda row: params(*row), rows), what, interrupts.check)
            return _settled(client, requests, names, outputs)
        except EngineError:  # nothing is left that could be ended
            raise
        except BaseException:
            _clean_up(client, names, interrupts)
            raise


def _clean_up(client: Client, names: Sequence[str], interrupts: PutOff) -> None:
    """Leaves an engine that the next call can use, or one that says why it cannot."""
    try:
        if not interrupts.is_torn:
            client.abandon(names)
    finally:
        if interrupts.is_torn:
            client.give_up()


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
    """VLLM's sampling parameters for the requests of a call. Checking them is dear, so equal ones are checked once.

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
            self._checked[key] = self._class(**request.arguments, skip_clone=True)
        spec = request.spec(name, group)
        params = copy(self._checked[key])
        params.extra_args = None if spec is None else spec.to_args()
        return params


def _hold(client: Client, plans: Mapping[str, CompiledPlan]) -> None:
    """Sends the workers the vectors of plans that they do not hold yet."""
    missing, dropped = client.held.take(plans)
    try:
        if dropped:
            client.ask("drop", dropped)
        if missing:
            client.ask("hold", *holding(missing))
    except BaseException:
        client.held.lose(missing)
        raise


def holding(plans: Mapping[str, CompiledPlan]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the command `hold` takes: plans by fingerprint as a header and arrays."""
    header = {
        name: {"layers": plan.layers, "places": plan.places, "groups": plan.groups} for name, plan in plans.items()
    }
    arrays = {f"{name}.units": plan.units for name, plan in plans.items()}
    return header, arrays | {f"{name}.params": plan.params for name, plan in plans.items()}


def _settled(
    client: Client, requests: Sequence[Request], names: Sequence[str], outputs: Sequence[Any]
) -> list[Outcome]:
    outcomes = [Outcome(output) for output in outputs]
    wanted = [name for request, name in _named(requests, names) if request.has_work]
    if not wanted:
        return outcomes
    by_name = dict(zip(names, outcomes, strict=True))
    enter_accounts(by_name, client.ask("settle", wanted))
    for request, name in _named(requests, names):
        if request.has_work and not by_name[name].ran:
            raise ReceiptError(f"Row {request.row_index}: no worker has an account of this request.")
    return outcomes


def enter_accounts(by_name: Mapping[str, Outcome], answers: Sequence[tuple[Any, dict[str, np.ndarray]]]) -> None:
    """Adds every worker's answer to `settle` to the outcomes of the rows it names; other rows are left out.

    Raises:
        ReceiptError: if a row could not be carried out as asked, or ranks disagree.
    """
    settled = [Settled(*answer) for answer in answers]
    for one in settled:
        if one.header["tp"] == 0:
            mine = [row for row in one.header["rows"] if row in by_name]
            _check_alike(one, [other for other in settled if other.header["pp"] == one.header["pp"]], mine)
            for row in mine:
                one.enter(row, by_name[row])


class Settled:
    """One worker's answer to `settle`.

    Args:
        header: the rows in order, and what went wrong.
        arrays: entries of all rows one after the other, and how many each row has.
    """

    def __init__(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.header, self._arrays = header, arrays
        self._index = {row: index for index, row in enumerate(header["rows"])}
        self._ends = {name: np.cumsum(arrays[f"n_{name}"]).tolist() for name in _PARTS}

    def of(self, name: str, row: str) -> np.ndarray:
        """A row's part of an array."""
        index, ends = self._index[row], self._ends[name]
        return self._arrays[name][ends[index - 1] if index else 0 : ends[index]]

    def counts(self, row: str) -> list[tuple[int, int]]:
        """Per edit the tokens edited; nothing if the worker has no account of the row."""
        if row not in self._index:
            return []
        return list(zip(self.of("edits", row).tolist(), self.of("tally", row)[:, 0].tolist(), strict=True))

    def enter(self, row: str, outcome: Outcome) -> None:
        """Adds a row's account to its outcome.

        Raises:
            ReceiptError: if it could not be carried out as asked.
        """
        if row in self.header["problems"]:
            problem = self.header["problems"][row]
            raise ReceiptError(f"A request could not be carried out as asked: {problem}.")
        outcome.ran = list(map(tuple, self.of("ran", row).tolist()))
        outcome.tally |= zip(self.of("edits", row).tolist(), map(tuple, self.of("tally", row).tolist()), strict=True)
        outcome.read = self.of("read", row).tolist()
        streams = self._arrays.get(f"streams.{row}")
        if streams is not None:
            outcome.streams |= dict(zip(self.header["layers"], streams, strict=True))
        at = self.of("at", row)
        if len(at):  # of pipeline stages only the last one measures
            outcome.at, outcome.measured = at, self.of("measured", row).reshape(-1, len(at))
            outcome.distribution = self._arrays.get(f"distribution.{row}")

    def measured_like(self, other: "Settled", row: str) -> bool:
        """Whether two ranks measured the same."""
        if row not in self._index or row not in other._index:
            return (row in self._index) == (row in other._index)
        mine, theirs = self.of("measured", row), other.of("measured", row)
        same_shape = mine.shape == theirs.shape
        return same_shape and np.allclose(mine, theirs, rtol=_RANKS_APART, atol=_RANKS_APART, equal_nan=True)


def _check_alike(first: Settled, others: Sequence[Settled], rows: Sequence[str]) -> None:
    """Tensor-parallel ranks of one stage must have edited the same tokens, and measured the same."""
    for other in others:
        if other is first:
            continue
        differing = [row for row in rows if other.counts(row) != first.counts(row)]
        if differing:
            row = differing[0]
            raise ReceiptError(
                f"Tensor-parallel ranks {first.header['tp']} and {other.header['tp']} edited different tokens of a "
                f"request: {first.counts(row)} and {other.counts(row)}."
            )
        if not all(first.measured_like(other, row) for row in rows):
            raise ReceiptError(
                f"Tensor-parallel ranks {first.header['tp']} and {other.header['tp']} measured different values of the "
                "same predictions. They hold different streams or logits; the scores cannot be trusted."
            )
