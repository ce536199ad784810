"""What a request carries to the workers: which plan, at which absolute positions, and what to read and measure.

It travels in `SamplingParams.extra_args`, as one string of JSON: vLLM looks at every element of a list on its way.
Positions are absolute, so that they mean the same in a chunked prefill, after a preemption, and past a prefix found in
the cache.
"""

import array
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steerlab.core.errors import InputError, PolicyError
from steerlab.engines.vllm._wire.config import KEY
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens, bounds_of, clip, depends_on_tokens, runs_between
from steerlab.measures.quantities import Quantity, from_json

SharedPrefix = tuple[str, int]
"""A name, and the number of leading tokens that all requests with it share."""

Group = tuple[str, int]
"""A name, and how many requests have it."""


@dataclass(frozen=True)
class ScoreSpec:
    """Predictions of a request that are measured, one after the other.

    Attributes:
        start: the first position whose prediction is wanted.
        tokens: the token that each prediction is about. The last one need not be submitted: it drives nothing.
        measures: what is measured of each.
        n_first: how many of the tokens are about the first position; the others are about one position each, in turn.
    """

    start: int
    tokens: tuple[int, ...]
    measures: tuple[Quantity, ...]
    n_first: int = 1

    def position(self, index: int) -> int:
        """The position whose prediction token `index` is about."""
        return self.start + max(0, index - self.n_first + 1)

    def between(self, start: int, stop: int) -> range:
        """Which of the tokens are about positions start ≤ p < stop."""
        first = 0 if start <= self.start else start - self.start + self.n_first - 1
        last = 0 if stop <= self.start else stop - self.start + self.n_first - 1
        return range(min(first, len(self.tokens)), min(last, len(self.tokens)))

    def to_json(self) -> dict[str, Any]:
        """As a request carries it."""
        numbers = {"start": self.start, "tokens": _packed(self.tokens), "n_first": self.n_first}
        return {**numbers, "measures": [m.to_json() for m in self.measures]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "ScoreSpec":
        tokens, measures = _unpacked(body["tokens"]), tuple(map(from_json, body["measures"]))
        return cls(body["start"], tokens, measures, body["n_first"])


@dataclass(frozen=True)
class RequestSpec:
    """One request's steering, reading and measuring.

    Attributes:
        row: names the request within its engine, for receipts and activations.
        plan: fingerprint of the compiled plan, whose vectors the workers hold; None if nothing is edited.
        groups: per group of edits that act at the same positions, those positions; where tokens decide, with the
            combinations of the plan's token rules in which they act.
        read: positions whose activations are wanted.
        score: predictions that are measured.
        draw: whether log q of every sampled token is wanted.
        support: whether the set that it was drawn from is wanted too.
        prefix: names requests that begin with the same tokens and edits, and how many; None if there are no others.
        group: names requests of which none runs before all have arrived; None if it need not wait.
        origin: the position of the first generated token; None if nothing depends on it.
        n_reads: how many of the groups, the last ones, are positions that conditions read instead.
        read_from: names the tokens up to the last position that is read so.
    """

    row: str
    plan: str | None
    groups: tuple[Runs | RunsByTokens, ...] = ()
    read: Runs = ()
    score: ScoreSpec | None = None
    draw: bool = False
    prefix: SharedPrefix | None = None
    group: Group | None = None
    origin: int | None = None
    n_reads: int = 0
    read_from: str = ""
    support: bool = False

    def to_args(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "row": self.row,
            "plan": self.plan,
            "groups": [bounds_of(g) for g in self.groups],
            "read": bounds_of(self.read),
        }
        if self.follows:
            body["truths"] = [[truth for _, _, *rest in group for truth in rest] for group in self.groups]
        if self.score is not None:
            body["score"] = self.score.to_json()
        if self.draw:
            body["draw"] = True
        if self.support:
            body["support"] = True
        if self.prefix is not None:
            body["prefix"] = self.prefix
        if self.group is not None:
            body["group"] = self.group
        if self.origin is not None:
            body["origin"] = self.origin
        if self.n_reads:
            body["reads"] = [self.n_reads, self.read_from]
        return {KEY: json.dumps(body)}

    @classmethod
    def of(cls, sampling_params: Any) -> "RequestSpec | None":
        """The steering that a request's sampling parameters carry; None if there is none, or it is not ours."""
        args = None if sampling_params is None else sampling_params.extra_args
        text = args.get(KEY) if args else None
        return _read(text) if isinstance(text, str) else None

    def key_between(self, start: int, stop: int) -> str | None:
        """Names the edits at positions start ≤ p < stop; None if there are none."""
        if not self.groups:
            return None
        first, last = self._everywhere
        inside: Any = "everywhere"
        if not first <= start < stop <= last:  # most blocks are edited at all their positions, and are named at once
            inside = [clip(runs, start, stop) for runs in self._acting]
            if not any(inside):
                return None
            if all(len(runs) == 1 and runs[0] == (start, stop) for runs in inside):
                inside = "everywhere"
        counted = "" if self.origin is None or stop <= self.origin else f":{self.origin}"  # in a prompt all are alike
        return f"{self.plan}:{inside}{counted}{self._asked}"

    @functools.cached_property
    def _acting(self) -> tuple[Runs | RunsByTokens, ...]:
        """The positions of each group of edits."""
        return self.groups[: len(self.groups) - self.n_reads]

    @functools.cached_property
    def _everywhere(self) -> tuple[int, int]:
        """Positions first ≤ p < last at all of which every group acts, whatever tokens come, if each has one run."""
        if not self._acting or any(len(runs) != 1 or len(runs[0]) != 2 for runs in self._acting):
            return 0, 0
        return max(runs[0][0] for runs in self._acting), min(runs[0][1] for runs in self._acting)

    @functools.cached_property
    def _asked(self) -> str:
        """Names what conditions read; the answer may lie beyond a block."""
        return f":{self.reads}:{self.read_from}" if self.n_reads else ""

    @property
    def reads(self) -> tuple[Runs, ...]:
        """The positions that each condition reads."""
        return tuple(map(_plain, self.groups[len(self.groups) - self.n_reads :]))

    @property
    def follows(self) -> bool:
        """Whether tokens decide where some edits act."""
        return any(map(depends_on_tokens, self.groups))

    @property
    def first_read(self) -> int | None:
        """The first position that a condition reads; None without conditions."""
        return min((runs[0][0] for runs in self.reads if runs), default=None)


def _plain(runs: Runs | RunsByTokens) -> Runs:
    return tuple((first, last) for first, last, *_ in runs)


def _with_truths(runs: Runs, truths: Sequence[int]) -> Runs | RunsByTokens:
    return tuple((*run, truth) for run, truth in zip(runs, truths, strict=True)) if truths else runs


def _are_bounds(bounds: Any) -> bool:
    is_list = isinstance(bounds, list | tuple) and len(bounds) % 2 == 0
    return is_list and all(type(bound) is int for bound in bounds)


def _are_truths(truths: Any, groups: Sequence[Sequence[int]]) -> bool:
    """Whether there is a number for every run of a group, or none at all."""
    if not isinstance(truths, list) or len(truths) != len(groups):
        return False
    return all(
        isinstance(found, list) and all(type(t) is int for t in found) and len(found) in (0, len(bounds) // 2)
        for found, bounds in zip(truths, groups, strict=True)
    )


def _packed(tokens: Sequence[int]) -> str:
    """Ids as one string, which is read sooner than a list; processes of one machine agree on the order of bytes."""
    return array.array("i", tokens).tobytes().hex()


def _unpacked(packed: str) -> tuple[int, ...]:
    return tuple(array.array("i", bytes.fromhex(packed)))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> RequestSpec | None:
    """What `to_args` wrote, if it did. Scheduler and worker may share a process, and ask for the same one."""
    try:
        body = json.loads(text)
        if not (_REQUIRED <= body.keys() <= _REQUIRED | _OPTIONAL and _are_sound(body)):
            return None
        return RequestSpec(
            body["row"],
            body["plan"],
            tuple(map(_with_truths, map(runs_between, body["groups"]), body.get("truths", [()] * len(body["groups"])))),
            runs_between(body["read"]),
            ScoreSpec.from_json(body["score"]) if "score" in body else None,
            "draw" in body,
            tuple(body["prefix"]) if "prefix" in body else None,
            tuple(body["group"]) if "group" in body else None,
            body.get("origin"),
            *body.get("reads", (0, "")),
            support="support" in body,
        )
    except (InputError, PolicyError, KeyError, TypeError, ValueError, AttributeError):
        return None


_REQUIRED = {"row", "plan", "groups", "read"}
_OPTIONAL = {"score", "draw", "support", "prefix", "group", "origin", "reads", "truths"}


def _are_sound(body: Mapping[str, Any]) -> bool:
    """Whether the parts of what a request carries are of the right kinds."""
    if not (isinstance(body["row"], str) and isinstance(body["plan"], str | None) and isinstance(body["groups"], list)):
        return False
    if not all(body.get(name, True) is True for name in ("draw", "support")):
        return False
    if not all(map(_are_bounds, (*body["groups"], body["read"]))):
        return False
    if any([type(part) for part in body[name]] != [str, int] for name in ("prefix", "group") if name in body):
        return False
    if "reads" in body and [type(part) for part in body["reads"]] != [int, str]:
        return False
    if "truths" in body and not _are_truths(body["truths"], body["groups"]):
        return False
    if type(body.get("origin", 0)) is not int:
        return False
    return "score" not in body or (type(body["score"]["start"]) is int and type(body["score"]["n_first"]) is int)
