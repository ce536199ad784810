"""One call of `generate` or `stream`: runs batches of rows through the generation loop and collects the results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerlab._runtime.backend import Backend
from steerlab._runtime.capturing import plan_hooks
from steerlab._runtime.decoding import Decoding, RowOutput, StopRules, eos_token_ids
from steerlab._runtime.growth import fresh_rows
from steerlab._runtime.hooks import HookPair
from steerlab._runtime.jobs import GenerationJob, job_receipts, ran_tokens
from steerlab.core._not_finite_errors import not_finite
from steerlab.core._spelling import INCOMPLETE, Continuation
from steerlab.core._stopping import before_stop, find_stop
from steerlab.core.errors import InputError, NonFiniteError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt
from steerlab.core.results import Completion
from steerlab.engines.lens._backends import choose_backend, warn_once
from steerlab.engines.lens._program import ProgramFailedError
from steerlab.engines.lens._program_rows import COMPARED, NO_MEMORY, ProgramRows, why_no_program
from steerlab.steering._plan_assignment import AssignedPlan
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan
from steerlab.steering.positions._prompt_lookup import PromptContent

_FEW_TOKENS = 8
Attach = Callable[[], AbstractContextManager[None]]


def stop_rules(bridge: Any, tokenizer: Any, strings: tuple[str, ...], max_new_tokens: int) -> StopRules:
    """When rows end."""
    return StopRules(eos_token_ids(bridge.original_model, tokenizer), strings, max_new_tokens)


@dataclass
class GenerationTask:
    """A call in progress.

    Attributes:
        bridge: the TransformerBridge.
        tokenizer: the model's own tokenizer.
        policy: the sampling policy.
        rules: when rows end.
        engine: the requested way to run the model: `auto`, `bridge`, `fast`, `graph` or `compiled`.
        contents: per prompt of the call, what `span` and `mask` positions look at.
        outputs: by row index, what each row produced.
        receipts: by row index.
        engine_used: the way the model ran; several are joined by `+`.
        with_support: record the set that every token was drawn from.
    """

    bridge: Any
    tokenizer: Any
    policy: SamplingPolicy
    rules: StopRules
    engine: str = "auto"
    contents: Sequence[PromptContent] | None = None
    outputs: dict[int, RowOutput] = field(default_factory=dict)
    receipts: dict[int, Receipt] = field(default_factory=dict)
    engine_used: str = ""
    with_support: bool = False

    def __post_init__(self) -> None:
        SamplingPolicy.check(self.policy)

    def run(
        self,
        jobs: Sequence[GenerationJob],
        assigned: AssignedPlan,
        watch: Callable[[], Sequence[HookPair]] = tuple,
    ) -> None:
        """Generates one batch of rows under one plan.

        Args:
            jobs: the rows.
            assigned: their plan.
            watch: gives further hooks, which read and change nothing; they come after the plan's.
        """
        try:
            run, outputs = self._generated(self._prepare(jobs, assigned, watch()), jobs)
        except ProgramFailedError as error:
            self._report(error.reason)
        else:
            self._finish(jobs, outputs, run, assigned)
            return
        # from the start and outside the handler, which holds what the program took; each draw has its own key
        run, outputs = self._generated(self._prepare(jobs, assigned, watch(), by_program=False), jobs)
        self._finish(jobs, outputs, run, assigned)

    def _generated(self, prepared: "_Prepared", jobs: Sequence[GenerationJob]) -> tuple[PlanRun, list[RowOutput]]:
        decoding = self._decoding(prepared.rows, jobs)
        with prepared.attach():
            outputs = decoding.run()
            _settle(prepared.rows)
        self._note(prepared.engine)
        return prepared.run, outputs

    def stream(self, job: GenerationJob, assigned: AssignedPlan) -> Iterator[str]:
        """Generates one row, yielding its text as it grows; between the pieces no hook is on the model."""
        prepared = self._prepare([job], assigned, (), streams=True)
        run, rows = prepared.run, prepared.rows
        self._note(prepared.engine)
        decoding = self._decoding(rows, [job])
        after = Continuation(self.tokenizer, job.prompt)
        ids: list[int] = []
        given = 0
        for tokens in self._only_while_running(decoding.steps(), prepared.attach):
            if int(tokens[0]) < 0:  # its logits are not finite
                break
            ids.append(int(tokens[0]))
            ready = self._ready(after.text(ids))
            if len(ready) > given:
                yield ready[given:]
                given = len(ready)
        _settle(rows)
        self._finish([job], decoding.outputs(), run, assigned)
        if self.outputs[job.row_index].finish_reason == "error":
            raise self.failure("The logits of the prompt's row", steered=bool(len(run.plan)))
        rest = self.completion(job).text[given:]
        if rest:
            yield rest

    def completion(self, job: GenerationJob) -> Completion:
        """The finished row."""
        output = self.outputs[job.row_index]
        text = Continuation(self.tokenizer, job.prompt).text(output.token_ids)
        return Completion(
            text=before_stop(text, self.rules.strings),
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            prompt_index=job.prompt_index,
            sample_index=job.sample_index,
            token_log_probs=output.token_log_probs,
            token_log_qs=output.token_log_qs,
            supports=output.supports,
        )

    def failure(self, what: str, *, steered: bool) -> NonFiniteError:
        """The error for a row whose logits are not finite."""
        return not_finite(what, self.bridge.original_model.get_input_embeddings().weight.dtype, steered=steered)

    def _ready(self, text: str) -> str:
        """The part of a growing text that can be shown: whole characters, and nothing that may become a stop string."""
        cut = find_stop(text, self.rules.strings)
        if cut is not None:
            return text[:cut]
        text = text.rstrip(INCOMPLETE)
        held = max((_overlap(text, string) for string in self.rules.strings), default=0)
        return text[: len(text) - held]

    def _prepare(
        self,
        jobs: Sequence[GenerationJob],
        assigned: AssignedPlan,
        watch: Sequence[HookPair],
        *,
        streams: bool = False,
        by_program: bool = True,
    ) -> "_Prepared":
        """The plan's run and fresh rows on the right backend."""
        lens = [len(job.prompt) for job in jobs]
        contents = None if self.contents is None else [self.contents[job.prompt_index] for job in jobs]
        run = PlanRun(assigned.plan, len(jobs), contents)
        hooks = [*plan_hooks(run), *watch] if self.rules.max_new_tokens else []
        backend = choose_backend(self.bridge, [name for name, _ in hooks], self.engine)
        way = self._program(backend, run.plan, watches=bool(watch), streams=streams) if by_program else None
        if way is not None:
            rows = ProgramRows(self.bridge, run, lens, self.rules.max_new_tokens, is_compiled=way == "compiled")
            if rows.known_failure is None:
                return _Prepared(run, rows, rows.alone, way)
            self._report(rows.known_failure)
        rows = fresh_rows(backend.model, run, lens, "step")
        return _Prepared(run, rows, partial(backend.attached, hooks), backend.name)

    def _program(self, backend: Backend, plan: Plan, *, watches: bool, streams: bool) -> str | None:
        """Which kind of program is to run the tokens after the prompt, if one is.

        Raises:
            InputError: if one is asked for by name and none can be made.
        """
        if not self._is_named and (self.engine != "auto" or watches or streams or not self._pays(backend)):
            return None
        way = self.engine if self._is_named else "graph"
        reason = "It reads no activations." if watches else None
        reason = reason or why_no_program(self.bridge, plan, is_compiled=way == "compiled")
        if reason is None:
            return way
        if self._is_named or reason.startswith((NO_MEMORY, COMPARED)):
            self._report(reason)
        return None

    @property
    def _is_named(self) -> bool:
        """Whether a program was asked for by name."""
        return self.engine in ("graph", "compiled")

    def _report(self, reason: str) -> None:
        """Says, once for each reason, that no program runs.

        Raises:
            InputError: if one was asked for by name.
        """
        if self._is_named:
            raise InputError(f"engine={self.engine!r} cannot run here: {reason} Use engine='fast'.")
        warn_once(self.bridge, f"{reason} Generation runs on the fast engine.")

    def _pays(self, backend: Backend) -> bool:
        """Whether recording a program is worth its time: on a GPU, if more than a few tokens follow."""
        device = backend.model.get_input_embeddings().weight.device
        return backend.name == "fast" and device.type == "cuda" and self.rules.max_new_tokens >= _FEW_TOKENS

    def _only_while_running(self, steps: Iterator[Tensor], attach: Attach) -> Iterator[Tensor]:
        """The steps one by one; hooks are on for each and gone when the caller has it: other calls may come between."""
        while True:
            try:
                with attach():
                    tokens = next(steps)
            except StopIteration:
                return
            except ProgramFailedError as error:  # streams use programs only if asked to by name
                self._report(error.reason)
                raise
            yield tokens

    def _note(self, engine: str) -> None:
        used = [*self.engine_used.split("+"), engine] if self.engine_used else [engine]
        self.engine_used = "+".join(dict.fromkeys(used))

    def _decoding(self, rows: Any, jobs: Sequence[GenerationJob]) -> Decoding:
        keys = torch.from_numpy(np.stack([job.keys for job in jobs]))
        prompts = [job.prompt for job in jobs]
        return Decoding(rows, prompts, self.policy, keys, self.rules, self.tokenizer, with_support=self.with_support)

    def _finish(
        self, jobs: Sequence[GenerationJob], outputs: list[RowOutput], run: PlanRun, assigned: AssignedPlan
    ) -> None:
        ran = [ran_tokens(job, output) for job, output in zip(jobs, outputs, strict=True)]
        self.outputs.update(zip([job.row_index for job in jobs], outputs, strict=True))
        self.receipts.update(job_receipts(run, jobs, ran, assigned.given_hash))


@dataclass(frozen=True)
class _Prepared:
    """What runs a batch.

    Attributes:
        run: the plan's run.
        rows: fresh rows.
        attach: makes the context to run them in.
        engine: what is to be noted of it.
    """

    run: PlanRun
    rows: Any
    attach: Attach
    engine: str


def _settle(rows: Any) -> None:
    if isinstance(rows, ProgramRows):
        with rows.alone():
            rows.settle()


def _overlap(text: str, string: str) -> int:
    """How many characters at the text's end begin the string."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
