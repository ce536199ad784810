"""A call's requests, carried out: plans to the workers, requests to vLLM, accounts back."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steerlab.core.errors import ReceiptError
from steerlab.engines.vllm.client import Client
from steerlab.engines.vllm.compiled_plan import CompiledPlan
from steerlab.engines.vllm.requests import Outcome, Request

_numbers = itertools.count()


def carry_out(client: Client, requests: Sequence[Request], what: str) -> list[Outcome]:
    """Runs all requests in one go; outcomes in their order.

    Raises:
        ReceiptError: if a worker could not do what a request asked for.
        SteerlabError: if a worker dies.
    """
    if not requests:
        return []
    names = [f"{next(_numbers)}" for _ in requests]
    plans = {request.compiled.fingerprint: request.compiled for request in requests if request.compiled is not None}
    _hold(client, plans)
    outputs = client.run([r.prompt() for r in requests], [_params(r, n) for r, n in _named(requests, names)], what)
    return _settled(client, requests, names, outputs)


def _named(requests: Sequence[Request], names: Sequence[str]) -> Any:
    return zip(requests, names, strict=True)


def _params(request: Request, name: str) -> Any:
    from vllm import SamplingParams

    spec = request.spec(name)
    return SamplingParams(**request.arguments, extra_args=None if spec is None else spec.to_args())


def _hold(client: Client, plans: Mapping[str, CompiledPlan]) -> None:
    """Sends the workers the vectors of plans that they do not hold yet."""
    missing, dropped = client.held.take(plans)
    if dropped:
        client.ask("drop", dropped)
    if missing:
        client.ask("hold", *holding(missing))


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
    wanted = [name for request, name in _named(requests, names) if request.spec(name) is not None]
    if not wanted:
        return outcomes
    by_name = dict(zip(names, outcomes, strict=True))
    enter_accounts(by_name, client.ask("settle", wanted))
    for request, name in _named(requests, names):
        if request.spec(name) is not None and not by_name[name].ran:
            raise ReceiptError(f"Row {request.row_index}: no worker has an account of this request.")
    return outcomes


def enter_accounts(by_name: Mapping[str, Outcome], answers: Sequence[tuple[Any, dict[str, np.ndarray]]]) -> None:
    """Adds every worker's answer to `settle` to the outcomes of the rows it names.

    Raises:
        ReceiptError: if a row could not be carried out as asked, or ranks disagree.
    """
    for header, arrays in answers:
        if header["tp"] == 0:
            _check_alike(header, [other for other, _ in answers])
            for name, account in header["accounts"].items():
                _enter(by_name[name], account, header["layers"], arrays.get(name))


def _enter(outcome: Outcome, account: dict[str, Any], layers: Sequence[int], streams: Any) -> None:
    """Adds one pipeline stage's account to an outcome."""
    if account["problem"]:
        raise ReceiptError(f"A request could not be carried out as asked: {account['problem']}.")
    outcome.ran = [tuple(run) for run in account["ran"]]
    outcome.tally |= {edit: tuple(values) for edit, values in account["tally"]}
    outcome.read = account["read"]
    if streams is not None:
        outcome.streams |= dict(zip(layers, streams, strict=True))


def _check_alike(first: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
    """Tensor-parallel ranks of one stage must have edited the same tokens."""
    for other in others:
        if other["pp"] != first["pp"]:
            continue
        for name, account in first["accounts"].items():
            theirs = other["accounts"].get(name, {"tally": None})["tally"]
            counts = [[(edit, values[0]) for edit, values in tally or []] for tally in (account["tally"], theirs)]
            if counts[0] != counts[1]:
                raise ReceiptError(
                    f"Tensor-parallel ranks {first['tp']} and {other['tp']} edited different tokens of a request: "
                    f"{counts[0]} and {counts[1]}."
                )
