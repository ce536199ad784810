"""One row of a call: what is submitted to vLLM for it, and what came back."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from steerlab.core._not_finite_errors import listed, not_finite
from steerlab.core.token_sets import TokenSets
from steerlab.engines.vllm._client.compiled_plan import CompiledPlan
from steerlab.engines.vllm._wire.plan_tables import ASKS
from steerlab.engines.vllm._wire.request_spec import Group, RequestSpec, ScoreSpec, SharedPrefix
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens
from steerlab.steering._plan_assignment import AssignedPlan

ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1, "detokenize": False, "ignore_eos": True}
"""Sampling parameters of a request that only runs its prompt; vLLM draws at least one token."""

_NOWHERE = np.zeros(0, dtype=np.int64)
_NO_ANSWERS = np.zeros((0, 2), dtype=np.float32)
_NOTHING = np.zeros((0, 0), dtype=np.float32)


@dataclass(frozen=True)
class Request:
    """One request to vLLM.

    Attributes:
        prompt_index: the caller's prompt.
        row_index: its place in the call's result.
        first_ids: what is submitted: a prompt, after which every token counts as generated.
        arguments: of vLLM's SamplingParams; one mapping for all requests that have the same.
        assigned: the plan as assigned to the prompt; None if nothing is steered in this call.
        compiled: the plan in the operator's terms; None without edits.
        groups: the positions of each group of its edits.
        read: positions whose activations are wanted.
        score: predictions that are measured.
        draw: whether log q of every sampled token is wanted.
        support: whether the set that it was drawn from is wanted too.
        seed: of its draws; None if it draws greedily.
        cache_salt: the caller's own salt for the prefix cache.
        prefix: names requests of its call that begin with the same tokens and edits, and how many.
        further_ids: what is submitted after `first_ids`; requests with the same beginning hold it once.
    """

    prompt_index: int
    row_index: int
    first_ids: tuple[int, ...]
    arguments: Mapping[str, Any]
    assigned: AssignedPlan
    compiled: CompiledPlan | None = None
    groups: tuple[Runs | RunsByTokens, ...] = ()
    read: Runs = ()
    score: ScoreSpec | None = None
    draw: bool = False
    support: bool = False
    seed: int | None = None
    cache_salt: str | None = None
    prefix: SharedPrefix | None = None
    further_ids: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that is submitted."""
        return self.first_ids + self.further_ids

    @property
    def n_tokens(self) -> int:
        """How many tokens are submitted."""
        return len(self.first_ids) + len(self.further_ids)

    @property
    def has_work(self) -> bool:
        """Whether anything is edited, read or measured."""
        return self.compiled is not None or bool(self.read) or self.score is not None or self.draw

    def spec(self, row: str, group: Group | None = None) -> RequestSpec | None:
        """What scheduler and workers receive; None if there is nothing to do.

        Where an edit may be reached before its condition is answered, a block's states depend on how the prompt was cut
        into passes, which is found out when the request has ended. Such a request shares no block that it edits.
        """
        if not self.has_work:
            return None
        plan = None if self.compiled is None else self.compiled.fingerprint
        origin = len(self.first_ids) if self.compiled is not None and self.compiled.counts_generated else None
        read, may_be_early = self._read_until, self._may_be_early
        read_from = hashlib.sha256(repr(self.token_ids[: max(read)]).encode()).hexdigest()[:16] if read else ""
        return RequestSpec(
            row,
            plan,
            self.groups,
            self.read,
            self.score,
            self.draw,
            None if may_be_early else self.prefix,
            group,
            origin,
            len(read),
            f"{read_from}:{row}" if may_be_early else read_from,
            support=self.support,
        )

    def fits_one_pass(self, n_tokens: int) -> bool:
        """Whether all that its conditions read can be in one pass of so many tokens."""
        return max(self._read_until, default=0) <= n_tokens

    @property
    def _read_until(self) -> list[int]:
        """Of each condition, the position after the last one that it reads."""
        count = 0 if self.compiled is None else len(self.compiled.tables.conditions)
        groups = self.groups[len(self.groups) - count :] if count else ()
        return [max((last for _, last, *_ in runs), default=0) for runs in groups]

    @property
    def _may_be_early(self) -> bool:
        """Whether an edit acts at a position before the last one that its conditions read."""
        read = self._read_until
        if self.compiled is None or not read:
            return False
        asked = self.compiled.tables.edits[:, ASKS].astype(int).tolist()
        for group, asks in zip(self.compiled.groups, asked, strict=True):
            answered = max((stop - 1 for place, stop in enumerate(read) if asks >> place & 1), default=0)
            if min((first for first, *_ in self.groups[group]), default=answered) < answered:
                return True
        return False

    def prompt(self) -> dict[str, Any]:
        """As vLLM takes a prompt."""
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"prompt_token_ids": [*self.first_ids, *self.further_ids], **salt}


@dataclass
class Outcome:
    """What came back for one request.

    Attributes:
        output: vLLM's RequestOutput.
        ran: runs of positions that went through the model.
        tally: per edit of the plan, tokens edited, summed ‖Δx‖/‖x‖, and tokens that came before its condition was
            answered.
        answers: per condition of the plan, sum and count of what was read.
        read: positions that were read, in order.
        streams: per wired hook point, their activations, float32 [positions, d_model].
        at: which predictions were measured, each once and in order: tokens of its `score`, or for log q the positions.
        measured: per quantity with one value a prediction, those values, float32 [quantities, predictions].
        distribution: log-distributions of these predictions, float32 [predictions, d_vocab], if asked for.
        supports: the sets that the tokens after the positions `at` were drawn from, if asked for.
        sampled: the tokens that it has drawn, where `output` is not at hand.
    """

    output: Any
    ran: list[tuple[int, int]] = field(default_factory=list)
    tally: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    answers: np.ndarray = field(default_factory=lambda: _NO_ANSWERS)
    read: list[int] = field(default_factory=list)
    streams: dict[int, Any] = field(default_factory=dict)
    at: np.ndarray = field(default_factory=lambda: _NOWHERE)
    measured: np.ndarray = field(default_factory=lambda: _NOTHING)
    distribution: np.ndarray | None = None
    supports: TokenSets | None = None
    sampled: tuple[int, ...] | None = None

    @property
    def generated_ids(self) -> tuple[int, ...]:
        """The tokens that it has drawn, as far as they came back."""
        if self.sampled is not None:
            return self.sampled
        return () if self.output is None else tuple(self.output.outputs[0].token_ids)

    @property
    def end(self) -> int:
        """The position after the last one that went through the model."""
        return max((last for _, last in self.ran), default=0)

    @property
    def came_early(self) -> bool:
        """Whether an edit was reached before its condition was answered."""
        return any(early for _, _, early in self.tally.values())

    @property
    def has_failed(self) -> bool:
        """Whether vLLM ended it because its logits were not finite."""
        return any(one.finish_reason == "error" for one in self.output.outputs)

    @property
    def has_nan(self) -> bool:
        """Whether a measured value is NaN or an activation not finite; −inf is a log-probability of 0."""
        distributions = () if self.distribution is None else (self.distribution,)
        return any(bool(np.isnan(values).any()) for values in (self.measured, *distributions)) or any(
            not bool(np.isfinite(stream).all()) for stream in self.streams.values()
        )


RunRows: TypeAlias = Callable[..., list[Outcome]]
"""Runs the requests of a call on a vLLM, as `run_requests` does on a connection of its own."""


def require_finite(requests: Sequence[Request], outcomes: Sequence[Outcome], dtype: str) -> None:
    """Checks that everything that was measured and read is a number.

    Raises:
        NonFiniteError: otherwise; names the prompts.
    """
    failed = [r for r, o in zip(requests, outcomes, strict=True) if o.has_failed or o.has_nan]
    if failed:
        indices = sorted({request.prompt_index for request in failed})
        what = f"The activations or logits of prompt{'s' if len(indices) > 1 else ''} {listed(indices)}"
        raise not_finite(what, dtype, steered=any(request.compiled is not None for request in failed))
