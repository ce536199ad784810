"""Receipts from what the workers counted, positions inherited from the prefix cache included."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from steerlab.core.errors import PlanError, ReceiptError
from steerlab.core.receipts import EditReceipt, Inherited, Receipt, mean_change
from steerlab.engines.vllm._client.position_runs import acting
from steerlab.engines.vllm._client.requests import Outcome, Request
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens, clip, depends_on_tokens, merged, positions_in, size

KEPT_ACCOUNTS = 1024
"""Accounts that are kept: the rows of a call are often of one length, and edited at the same positions."""

RowsBeside: TypeAlias = tuple[tuple[Receipt, ...], tuple[Inherited, ...]]
"""Receipts and inherited positions of a call's rows."""


def receipts_of(requests: Iterable[Request], outcomes: Iterable[Outcome], lengths: Iterable[int]) -> RowsBeside:
    """Checked receipts and inherited positions of a call's rows; see `receipt_of`."""
    rows = list(zip(requests, outcomes, lengths, strict=True))
    return tuple(receipt_of(*row) for row in rows), tuple(inherited_of(*row) for row in rows)


def receipt_of(request: Request, outcome: Outcome, length: int) -> Receipt:
    """The checked receipt of one row.

    Args:
        request: what was asked for.
        outcome: what the workers counted.
        length: tokens of the row that its result rests on; what ran beyond them is left out.

    Raises:
        ReceiptError: if an edit reached other positions than the plan implies, or a position was neither run nor
            inherited.
        PlanError: if an edit was reached before its condition was answered.
    """
    given, compiled = request.assigned.given_hash, request.compiled
    if compiled is None:
        return Receipt(request.prompt_index, request.row_index, given)
    account = _account_of(request, outcome, length)
    _check_covered(request, account, length)
    unknown = [_beyond_known(runs, request, outcome) for runs in request.groups]
    answers = compiled.answers(outcome.answers)
    entries = []
    for index, (label, group) in enumerate(zip(compiled.labels, compiled.groups, strict=True)):
        expected, beyond = (0, 0) if answers[index] is False else account.sizes[group]
        counted, change, early = outcome.tally.get(index, (0.0, 0.0, 0.0))
        if early:
            raise PlanError(
                f"Row {request.row_index}: an edit ({label[2]} at {label[0]}) was reached before its condition was "
                "answered. Read the probe at the edit's layer or an earlier one, and at positions up to the first that "
                "is edited; or, if the prompt ran in several passes, start the engine with a larger "
                "max_num_batched_tokens."
            )
        mean = mean_change(change, int(counted))
        point, layer, operator, vector = label
        edited = _settled(int(counted) - beyond, expected, unknown[group])
        entries.append(EditReceipt(point, layer, operator, edited, expected, mean, answers[index], vector))
    return Receipt(request.prompt_index, request.row_index, given, tuple(entries)).check()


def inherited_of(request: Request, outcome: Outcome, length: int) -> Inherited:
    """Which edited positions of a row came from the prefix cache."""
    if request.compiled is None:
        return Inherited(request.row_index, ())
    inherited = _account_of(request, outcome, length).inherited
    answers = request.compiled.answers(outcome.answers)
    acted = [
        () if answer is False else tuple(positions_in(inherited[group]))
        for group, answer in zip(request.compiled.groups, answers, strict=True)
    ]
    return Inherited(request.row_index, tuple(acted))


@dataclass(frozen=True)
class _Account:
    """What passes over a row imply.

    Attributes:
        start: the first position that ran.
        covered: the positions from there to the row's end that ran.
        sizes: per group of positions the edits that it implies, and by how many a worker's count exceeds them if all
            is well.
        inherited: per group the positions before all that ran, be it only after a preemption.
    """

    start: int
    covered: Runs
    sizes: tuple[tuple[int, int], ...]
    inherited: tuple[Runs, ...]


def _account_of(request: Request, outcome: Outcome, length: int) -> _Account:
    return _account(_acting(request, outcome), tuple(outcome.ran), length)


@lru_cache(maxsize=KEPT_ACCOUNTS)
def _account(groups: tuple[Runs, ...], ran: tuple[tuple[int, int], ...], length: int) -> _Account:
    start, once = min(first for first, _ in ran), merged(ran)
    inherited = tuple(clip(runs, 0, min(start, length)) for runs in groups)
    sizes = tuple(
        (size(clip(runs, 0, length)), _surplus(runs, ran, once, length) - size(before))
        for runs, before in zip(groups, inherited, strict=True)
    )
    return _Account(start, clip(once, start, length), sizes, inherited)


def _acting(request: Request, outcome: Outcome) -> tuple[Runs, ...]:
    """The positions of each group; where tokens decide, by the tokens that the row turned out to have."""
    if not any(map(depends_on_tokens, request.groups)):
        return request.groups  # pyright: ignore[reportReturnType]
    followed = () if request.compiled is None else request.compiled.followed
    return acting(request.groups, followed, request.token_ids + outcome.generated_ids, len(request.first_ids))


def _beyond_known(runs: Runs | RunsByTokens, request: Request, outcome: Outcome) -> int:
    """Positions at which tokens decide that ran, by a step already under way, with tokens that never came back."""
    if not depends_on_tokens(runs):
        return 0
    known = request.n_tokens + len(outcome.generated_ids)
    return sum(size(clip(runs, max(first, known), last)) for first, last in outcome.ran)


def _settled(edited: int, expected: int, unknown: int) -> int:
    """Edits of the row's own positions, given how many of those that were made nobody can tell."""
    return expected if expected < edited <= expected + unknown else edited


def _surplus(runs: Runs, ran: tuple[tuple[int, int], ...], once: Runs, length: int) -> int:
    """Edits that were made twice, after a preemption, or past the row's end, by a step that was already under way."""
    made = sum(size(clip(runs, first, last)) for first, last in ran)
    return made - sum(size(clip(runs, first, min(last, length))) for first, last in once if first < length)


def _check_covered(request: Request, account: _Account, length: int) -> None:
    """Every position from the first that ran up to the row's end must have run."""
    if account.start < length and size(account.covered) != length - account.start:
        raise ReceiptError(
            f"Row {request.row_index}: of positions {account.start} to {length - 1} only {list(account.covered)} went "
            "through the model. The result cannot be trusted."
        )
