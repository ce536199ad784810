"""Calls of the Engine protocol that arrive over HTTP, carried out as `VLLMEngine` does, in the server's own engine.

A call is a `VLLMEngine` of its own that shares the model with all others: what it submits runs in one batch with every
other request.
"""

import asyncio
import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from steerlab.core._hook_points import resolve_layers
from steerlab.core.errors import InputError, PolicyError
from steerlab.core.policy import SamplingPolicy
from steerlab.engines._http.frames import Frame
from steerlab.engines._http.plain import plain_result
from steerlab.engines._http.plans import plans_in
from steerlab.engines._http.results import result_frame
from steerlab.engines.vllm._client.capturing import MEDIAN_NORM
from steerlab.engines.vllm._client.requests import Outcome, Request
from steerlab.engines.vllm._client.served_model import ServedModel
from steerlab.engines.vllm._server.plans import PlanMaker
from steerlab.engines.vllm._server.positions_json import where_of
from steerlab.engines.vllm._server.rows import RowRunner
from steerlab.engines.vllm._wire.runs import size
from steerlab.measures import quantities
from steerlab.measures.quantities import LogDistribution
from steerlab.steering.plan import Plan

MAX_ROWS = 1 << 16
"""Rows that one call may have."""

_PLAIN = 5
"""How many times as long as the bytes of a number its digits in JSON are, about."""

_ALWAYS = {"prompts", "plans", "plan_of", "steering", "chat"}
OPTIONS: dict[str, set[str]] = {
    "generate": _ALWAYS
    | {"policy", "max_new_tokens", "n", "seed", "stop", "log_probs", "on_error", "cache_salt", "with_support"},
    "score": _ALWAYS | {"targets", "boundary", "variants", "score_eos"},
    "measure": _ALWAYS | {"targets", "measures", "boundary"},
    "capture": _ALWAYS | {"layers", "site", "where", "pool"},
    "median_norm": {"layer", "site"},
}
"""The calls there are, and what each takes."""

_NEEDED = {"score": {"targets"}, "measure": {"targets", "measures"}, "capture": {"layers"}}


class CallCancelled(Exception):
    """Nobody waits for a call any longer."""


@dataclass
class Progress:
    """How far a call is: rows that it has submitted, and those of them that have ended."""

    n_rows: int = 0
    n_done: int = 0

    def note(self) -> None:
        """One more has ended."""
        self.n_done += 1


@dataclass(frozen=True)
class Desk:
    """What every call works with.

    Attributes:
        model: what is served.
        maker: makes plans of `steering` fields, and knows the vectors that are offered.
        engine_of: the engine of a call, which runs its rows.
        runner: runs rows.
        loop: the server's.
        allows_vectors: whether a call may bring vectors that the server does not offer.
        limit: bytes of an answer.
    """

    model: ServedModel
    maker: PlanMaker
    engine_of: "Callable[[Call], Any]"
    runner: RowRunner | None
    loop: asyncio.AbstractEventLoop
    allows_vectors: bool
    limit: int


@dataclass
class Call:
    """One call, from its message to its answer. It works in a thread of its own; its rows run in the server's loop.

    Attributes:
        desk: what it works with.
        what: which call of an engine it is.
        frame: what was sent.
        plain: whether the answer is plain JSON.
        progress: how far it is.
    """

    desk: Desk
    what: str
    frame: Frame
    plain: bool = False
    progress: Progress = field(default_factory=Progress)
    _running: "Future[Any] | None" = None
    _is_cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Ends it, and its rows inside the engine."""
        with self._lock:
            self._is_cancelled = True
            running = self._running
        if running is not None:
            running.cancel()

    def answer(self) -> bytes:
        """Does what was asked, and returns the answer's message.

        Raises:
            SteerlabError: for what cannot be done.
            CallCancelled: if it was cancelled.
        """
        self._check_not_cancelled()
        engine = self.desk.engine_of(self)
        content = self._checked(self.frame.content)
        if self.what == "median_norm":
            norm = engine.median_norm(content["layer"], content.get("site", "resid_post"))
            return Frame({"median_norm": norm}).encoded()
        arguments = self._arguments(content)
        prompts = arguments.pop("prompts")
        result = getattr(engine, self.what)(prompts, **arguments)
        if self.plain:
            return Frame(plain_result(result)).encoded()
        frame = result_frame(result)
        self._check_size(frame.n_bytes)
        return frame.encoded()

    def run(self, requests: Sequence[Request], what: str, *, together: bool = False) -> list[Outcome]:
        """Runs rows, as `run_requests` does."""
        assert self.desk.runner is not None
        if not requests:
            return []
        _check_rows(len(requests))
        if what != MEDIAN_NORM:  # which is one number, and no part of the answer
            weight = _PLAIN if self.plain else 1
            self._check_size(weight * sum(self._bytes(request) for request in requests))
        self.progress.n_rows += len(requests)
        work = self.desk.runner.run(requests, self.progress.note)
        with self._lock:
            if self._is_cancelled:
                work.close()
                raise CallCancelled
            self._running = asyncio.run_coroutine_threadsafe(work, self.desk.loop)
        try:
            return self._running.result()
        except CancelledError as error:
            raise CallCancelled from error

    def _check_not_cancelled(self) -> None:
        if self._is_cancelled:
            raise CallCancelled

    def _bytes(self, request: Request) -> int:
        """Bytes of what the answer holds of a row."""
        info, asked = self.desk.model.info, self.frame.content
        n_positions = size(request.read) if asked.get("pool") is None else min(size(request.read), 1)
        n_layers = len(resolve_layers(asked["layers"], info.n_layers)) if n_positions else 0
        read = 4 * n_positions * info.d_model * n_layers
        score = request.score
        whole = score is not None and LogDistribution() in score.measures
        return read + (4 * len(score.tokens) * info.d_vocab if score is not None and whole else 0)

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > self.desk.limit:
            raise InputError(
                f"What this call asks for takes {n_bytes:,} bytes, and an answer of this server has at most "
                f"{self.desk.limit:,}; ask for fewer prompts, positions or layers at a time, pool them, or start the "
                "server with a larger --call-mib."
            )

    def _checked(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """What was sent, if this call takes it; a key that is null is absent."""
        known = OPTIONS[self.what]
        for key in content:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(sorted(known))}."
                raise InputError(f"{key[:80]}: unknown key; {hint}")
        found = {key: value for key, value in content.items() if value is not None or key == "plan_of"}
        needed = {"layer"} if self.what == "median_norm" else {"prompts"} | _NEEDED.get(self.what, set())
        missing = sorted(needed - found.keys())
        if missing:
            raise InputError(f"{missing[0]}: the key is missing.")
        return found

    def _arguments(self, content: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the engine's call."""
        found = {key: value for key, value in content.items() if key not in ("plans", "plan_of", "steering")}
        _check_rows(_count(found))
        found["plan"] = self._plan(content)
        if "policy" in found:
            found["policy"] = _policy(found["policy"])
        if "measures" in found:
            found["measures"] = _measures(found["measures"])
        if "where" in found:
            found["where"] = where_of(found["where"], self.desk.model.info)
        return found

    def _plan(self, content: Mapping[str, Any]) -> Any:
        steering = content.get("steering")
        if steering is not None:
            if content.get("plan_of") is not None:
                raise InputError("The call has both `steering` and `plan_of`; send one.")
            make = self.desk.maker.plan
            if isinstance(steering, list):
                return [None if one is None else make(one) for one in steering]
            return make(steering)
        plan = plans_in(content, self.frame.arrays)
        if not self.desk.allows_vectors:
            for one in [plan] if isinstance(plan, Plan | None) else plan:
                self._check_offered(one)
        return plan

    def _check_offered(self, plan: Plan | None) -> None:
        """A server that was not told to takes no vector from outside."""
        for vector in () if plan is None else (vector for edit in plan for vector in edit.vectors):
            if vector.hash not in self.desk.maker.registry.hashes:
                name = f"{vector.name!r} ({vector.hash})" if vector.name else vector.hash
                raise InputError(
                    f"The plan has the vector {name}, which is none of those that this server offers. Put its file "
                    "into a folder given to --vectors, or start the server with --allow-vectors, so that calls may "
                    "bring their own."
                )


def _check_rows(count: int) -> None:
    if count > MAX_ROWS:
        raise InputError(f"One call has at most {MAX_ROWS:,} rows, got {count:,}; ask for fewer at a time.")


def _count(content: Mapping[str, Any]) -> int:
    """Rows that a call asks for, before any is made; what is of the wrong kind is refused later."""
    targets, variants, n = content.get("targets"), content.get("variants"), content.get("n", 1)
    if isinstance(targets, list):
        n_variants = len(variants) if isinstance(variants, list) else 1
        return n_variants * sum(len(row) if isinstance(row, list) else 1 for row in targets)
    prompts = content["prompts"]
    return (len(prompts) if isinstance(prompts, list) else 1) * (n if isinstance(n, int) else 1)


def _policy(given: Any) -> SamplingPolicy:
    known = SamplingPolicy.__dataclass_fields__
    if not isinstance(given, dict) or not given.keys() <= known.keys():
        raise PolicyError(f"policy is an object with the keys {', '.join(known)}, got {given!r:.80}.")
    return SamplingPolicy(**given)


def _measures(given: Any) -> dict[str, Callable[..., Any]]:
    if not isinstance(given, dict):
        raise InputError(f"measures is an object of names and quantities, got {given!r:.80}.")
    return {name: quantities.from_json(one) for name, one in given.items()}
