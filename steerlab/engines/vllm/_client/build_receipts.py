"""Receipts from what the workers counted, positions inherited from the prefix cache included."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from steerlab.core.errors import PlanError, ReceiptError
from steerlab.core.receipts import EditReceipt, Inherited, Receipt, mean_change
from steerlab.engines.vllm._client.position_runs import acting
from steerlab.engines.vllm._client.requests import Outcome, Request
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens, clip, depends_on_tokens, merged, positions_in, size

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
    _check_covered(request, outcome, length)
    sizes = [_sizes(runs, outcome, length) for runs in _acting(request, outcome)]
    unknown = [_beyond_known(runs, request, outcome) for runs in request.groups]
    answers = compiled.answers(outcome.answers)
    entries = []
    for index, (label, group) in enumerate(zip(compiled.labels, compiled.groups, strict=True)):
        expected, beyond = (0, 0) if answers[index] is False else sizes[group]
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
    groups = () if request.compiled is None else request.compiled.groups
    if not groups:
        return Inherited(request.row_index, ())
    found = [tuple(positions_in(_inherited(runs, outcome, length))) for runs in _acting(request, outcome)]
    answers = request.compiled.answers(outcome.answers) if request.compiled is not None else []
    acted = [() if answer is False else found[group] for group, answer in zip(groups, answers, strict=True)]
    return Inherited(request.row_index, tuple(acted))


def _sizes(runs: Runs, outcome: Outcome, length: int) -> tuple[int, int]:
    """Edits that a group of positions implies, and by how many a worker's count exceeds them if all is well."""
    return size(clip(runs, 0, length)), _surplus(runs, outcome, length) - size(_inherited(runs, outcome, length))


def _acting(request: Request, outcome: Outcome) -> tuple[Runs, ...]:
    """The positions of each group; where tokens decide, by the tokens that the row turned out to have."""
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


def _inherited(runs: Runs, outcome: Outcome, length: int) -> Runs:
    """Edited positions before all that ran, be it only after a preemption."""
    return clip(runs, 0, min(_start(outcome), length))


def _start(outcome: Outcome) -> int:
    return min(first for first, _ in outcome.ran)


def _surplus(runs: Runs, outcome: Outcome, length: int) -> int:
    """Edits that were made twice, after a preemption, or past the row's end, by a step that was already under way."""
    made = sum(size(clip(runs, first, last)) for first, last in outcome.ran)
    kept = sum(size(clip(runs, first, min(last, length))) for first, last in merged(outcome.ran) if first < length)
    return made - kept


def _check_covered(request: Request, outcome: Outcome, length: int) -> None:
    """Every position from the first that ran up to the row's end must have run."""
    start = _start(outcome)
    covered: Sequence[tuple[int, int]] = clip(merged(outcome.ran), start, length)
    if start < length and size(covered) != length - start:
        raise ReceiptError(
            f"Row {request.row_index}: of positions {start} to {length - 1} only {list(covered)} went through the "
            "model. The result cannot be trusted."
        )
