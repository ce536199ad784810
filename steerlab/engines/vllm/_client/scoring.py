"""One call of `score` or `measure`: requests whose predictions the workers measure as they run them.

Prompt and target are submitted together without the target's last token, which drives nothing. Targets of one prompt
find the prompt in the prefix cache, also those that start in the same pass; only what predicts a target is always run.
All that follow one context share its last position too, which predicts the first token of each: one of their requests
measures that for all. So a prompt that fills its cache blocks exactly is not run again for each target, and targets of
a single token take one request together.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steerlab._runtime.encoding import Pair, raise_error
from steerlab.core.errors import InputError, ReceiptError, SteerlabError
from steerlab.engines.vllm._client.build_receipts import RowsBeside, receipts_of
from steerlab.engines.vllm._client.position_runs import Row
from steerlab.engines.vllm._client.ready_plans import Planner, ReadyPlan
from steerlab.engines.vllm._client.requests import ONE_TOKEN, Outcome, Request, RunRows, require_finite
from steerlab.engines.vllm._wire.request_spec import ScoreSpec, SharedPrefix
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens, clip
from steerlab.measures.quantities import LogDistribution, PolicyEntropy, PolicyLogQ, Quantity, TokenLogProb, check_named
from steerlab.steering.positions._prompt_lookup import PromptContent

Measures = Mapping[str, Callable[..., Any]]

_numbers = itertools.count()
POSSIBLE = (TokenLogProb, PolicyEntropy, PolicyLogQ, LogDistribution)


def check_measures(measures: Measures) -> dict[str, Quantity]:
    """The measures, if they can be serialised for vLLM's workers.

    Raises:
        InputError: if there are none, or one is a function, which cannot be serialised; names it.
    """
    check_named(measures)
    for name, measure in measures.items():
        if not isinstance(measure, POSSIBLE):
            raise InputError(
                f"{name!r} is {measure!r:.80}, which cannot be sent to vLLM's workers. They measure "
                f"{', '.join(kind.__name__ for kind in POSSIBLE)} of `steerlab.measures.quantities`; the "
                "TransformerLens engine takes any function of (logits, tokens)."
            )
    return {name: measure for name, measure in measures.items() if isinstance(measure, POSSIBLE)}


def score_requests(
    pairs: Sequence[Pair],
    contents: Sequence[PromptContent],
    plans: Sequence[ReadyPlan | SteerlabError],
    planner: Planner,
    measures: Sequence[Quantity],
) -> list[Request]:
    """A request per pair. The target's tokens count as generated.

    Raises:
        PlanError: for a plan that cannot run here.
    """
    asked = tuple(dict.fromkeys(measures))
    return [
        _request(row, pair, raise_error(plans[pair[0]]), planner, contents[pair[0]], asked)
        for row, pair in enumerate(pairs)
    ]


def _request(
    row: int, pair: Pair, ready: ReadyPlan, planner: Planner, content: PromptContent, measures: tuple[Quantity, ...]
) -> Request:
    index, _, ids = pair
    n_context, further = len(ids.context_ids), ids.target_ids[:-1]
    groups: tuple[Runs | RunsByTokens, ...] = ()
    if ready.compiled is not None:
        tokens = ids.context_ids + further
        groups = planner.positions(ready.compiled, Row(tokens, n_context, len(tokens), content))
    return Request(
        prompt_index=index,
        row_index=row,
        first_ids=ids.context_ids,
        further_ids=further,
        arguments=ONE_TOKEN,
        assigned=ready.assigned,
        compiled=ready.compiled,
        groups=groups,
        score=ScoreSpec(n_context - 1, ids.target_ids, measures),
    )


@dataclass(frozen=True)
class Place:
    """Which submitted requests measure a pair's predictions.

    Attributes:
        first: the request that measures the first one.
        index: which of its predictions that is.
        rest: the request that measures all others, if there are any, and whose account is the pair's.
    """

    first: int
    index: int
    rest: int


def shared(pairs: Sequence[Pair], requests: Sequence[Request]) -> tuple[list[Request], list[Place]]:
    """What to submit for some pairs, whose own requests these are, and where each finds its own."""
    families: dict[Any, list[int]] = {}
    contexts = _Numbered()
    for row, (pair, request) in enumerate(zip(pairs, requests, strict=True)):
        families.setdefault((contexts(pair[2].context_ids), _edits_before_target(request)), []).append(row)
    submitted: dict[int, Request] = {}
    places: dict[int, tuple[int, int, int]] = {}
    for rows in families.values():
        host = min(rows, key=lambda row: len(_score(requests[row]).tokens) > 1)  # the first of one token, if any
        guests = [row for row in rows if row != host]
        prefix = (f"{next(_numbers)}", _score(requests[host]).start + 1) if guests else None
        submitted[host] = requests[host]
        if guests:
            tokens = [_score(requests[row]).tokens[0] for row in guests]
            submitted[host] = _hosting(requests[host], tokens, prefix)
        places[host] = (host, len(guests), host)
        for index, row in enumerate(guests):
            is_alone = len(_score(requests[row]).tokens) == 1
            places[row] = (host, index, host if is_alone else row)
            if not is_alone:
                submitted[row] = _without_first(requests[row], prefix)
    order = {row: index for index, row in enumerate(sorted(submitted))}
    found = [places[row] for row in range(len(requests))]
    return [submitted[row] for row in order], [Place(order[a], index, order[b]) for a, index, b in found]


def _score(request: Request) -> ScoreSpec:
    assert request.score is not None
    return request.score


class _Numbered:
    """Numbers tuples, equal ones alike; one that is shared by many targets is looked at once."""

    def __init__(self) -> None:
        self._by_content: dict[tuple[int, ...], int] = {}
        self._by_identity: dict[int, int] = {}

    def __call__(self, ids: tuple[int, ...]) -> int:
        """The number of a tuple that outlives this object."""
        if id(ids) not in self._by_identity:
            self._by_identity[id(ids)] = self._by_content.setdefault(ids, len(self._by_content))
        return self._by_identity[id(ids)]


def _edits_before_target(request: Request) -> Any:
    """What is edited up to the position that predicts the first token: with the context, what requests can share."""
    if request.compiled is None:
        return None
    stop = _score(request).start + 1
    return request.compiled.fingerprint, tuple(clip(runs, 0, stop) for runs in request.groups)


def _hosting(request: Request, tokens: Sequence[int], prefix: SharedPrefix | None) -> Request:
    """A request that measures some other tokens at its first position, before its own."""
    score = _score(request)
    hosting = ScoreSpec(score.start, (*tokens, *score.tokens), score.measures, n_first=len(tokens) + 1)
    return replace(request, score=hosting, prefix=prefix)


def _without_first(request: Request, prefix: SharedPrefix | None) -> Request:
    score = _score(request)
    return replace(request, score=ScoreSpec(score.start + 1, score.tokens[1:], score.measures), prefix=prefix)


def run_scores(
    pairs: Sequence[Pair], requests: Sequence[Request], run: RunRows, dtype: str
) -> tuple[list[dict[Quantity, np.ndarray]], RowsBeside]:
    """Runs some pairs, whose own requests these are.

    Returns:
        What was measured of every pair's target tokens, see `measured_of`; the pairs' receipts and inherited positions.

    Raises:
        NonFiniteError: if something measured is NaN.
    """
    submitted, places = shared(pairs, requests)
    outcomes = run(submitted, "score", together=True)
    require_finite(submitted, outcomes, dtype)
    lengths = [request.n_tokens for request in requests]
    beside = receipts_of(requests, [outcomes[place.rest] for place in places], lengths)
    found = [measured_of(pair, place, submitted, outcomes) for pair, place in zip(pairs, places, strict=True)]
    return found, beside


def measured_of(
    pair: Pair, place: Place, submitted: Sequence[Request], outcomes: Sequence[Outcome]
) -> dict[Quantity, np.ndarray]:
    """What was measured of every target token, per quantity: float32 [tokens], or [tokens, d_vocab].

    Raises:
        ReceiptError: if a prediction was not measured.
    """
    first = _found(pair, submitted[place.first], outcomes[place.first])
    score = _score(submitted[place.first])
    stop = len(score.tokens) if place.index == score.n_first - 1 else place.index + 1
    head = {quantity: values[place.index : stop] for quantity, values in first.items()}
    if place.rest == place.first:
        return head
    rest = _found(pair, submitted[place.rest], outcomes[place.rest])
    return {quantity: np.concatenate([head[quantity], rest[quantity]]) for quantity in head}


def _found(pair: Pair, request: Request, outcome: Outcome) -> dict[Quantity, np.ndarray]:
    """All that one request was to measure."""
    index, target, _ = pair
    score = _score(request)
    if len(outcome.at) != len(score.tokens):  # each at most once
        missing = sorted({score.position(i) for i in set(range(len(score.tokens))) - set(outcome.at.tolist())})
        raise ReceiptError(
            f"Target {target} of prompt {index}: of {len(score.tokens)} predictions {len(outcome.at)} were measured; "
            f"missing is what positions {_listed(missing)} predict. They were read from the prefix cache or not run at "
            "all: vLLM's scheduler has to load steerlab's plugin (VLLM_PLUGINS, if set, names `steerlab`)."
        )
    scalars = [m for m in score.measures if not isinstance(m, LogDistribution)]
    found: dict[Quantity, np.ndarray] = dict(zip(scalars, outcome.measured, strict=True))
    if LogDistribution() in score.measures:
        if outcome.distribution is None:
            raise ReceiptError(f"Target {target} of prompt {index}: no worker returned its distributions.")
        found[LogDistribution()] = outcome.distribution
    return found


def _listed(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:8]))
    return f"{shown} and {len(positions) - 8} more" if len(positions) > 8 else shown
