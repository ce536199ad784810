"""One call of `capture`: batches of rows, run whole or generated, with their activations read on the way."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steerlab._runtime.capturing import Capture, plan_hooks
from steerlab._runtime.decoding import StopRules
from steerlab._runtime.growth import fresh_rows
from steerlab._runtime.jobs import GenerationJob, job_receipts, ran_tokens
from steerlab._runtime.rows import left_padded
from steerlab.core._hook_points import HeadPoint, HookPoint
from steerlab.core._not_finite_errors import not_finite
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt
from steerlab.core.results import Activations
from steerlab.engines.lens._backends import exact_backend
from steerlab.engines.lens._generating import GenerationTask
from steerlab.steering._plan_assignment import AssignedPlan
from steerlab.steering._run import PlanRun
from steerlab.steering.positions._prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Where


class _PassEnded(Exception):
    """Raised in a pass after the last layer that is edited or read: nobody looks at what the others would compute."""


def _end_the_pass(value: Tensor, hook: Any = None) -> None:
    raise _PassEnded


@dataclass
class CaptureTask:
    """A call in progress.

    Attributes:
        bridge: the TransformerBridge.
        tokenizer: the model's own tokenizer.
        points: the hook points to read.
        where: the positions to read.
        pool: `mean`, `last` or None.
        rules: how much to generate; nothing with `max_new_tokens=0`.
        policy: the sampling policy of that generation.
        contents: per prompt of the call, what `span` and `mask` positions look at.
    """

    bridge: Any
    tokenizer: Any
    points: Sequence[HookPoint | HeadPoint]
    where: Where
    pool: str | None
    rules: StopRules
    policy: SamplingPolicy
    contents: Sequence[PromptContent]
    values: dict[HookPoint | HeadPoint, dict[int, Tensor]] = field(default_factory=dict)
    positions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    completions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    receipts: dict[int, Receipt] = field(default_factory=dict)

    def run(self, jobs: Sequence[GenerationJob], assigned: AssignedPlan) -> None:
        """Reads one batch of rows under one plan."""
        marks = marks_for([self.where], self._contents(jobs))
        capture = Capture(self.points, self.where, self.pool, len(jobs), marks)
        if self.rules.max_new_tokens:
            ran = self._generate(jobs, assigned, capture)
        else:
            ran = self._pass(jobs, assigned, capture)
        indices = [job.row_index for job in jobs]
        for job, token_ids in zip(jobs, ran, strict=True):
            self.positions[job.row_index] = self._read_positions(job, token_ids)
        for point in self.points:
            values = capture.values(point)
            self._check_finite(point, values, jobs, steered=bool(len(assigned.plan)))
            self.values.setdefault(point, {}).update(zip(indices, values, strict=True))

    def _check_finite(
        self, point: HookPoint | HeadPoint, values: Sequence[Tensor], jobs: Sequence[GenerationJob], *, steered: bool
    ) -> None:
        for job, value in zip(jobs, values, strict=True):
            if not bool(value.isfinite().all()):
                what = f"The activations of prompt {job.prompt_index} at {point.name}"
                raise not_finite(what, self.bridge.original_model.get_input_embeddings().weight.dtype, steered=steered)

    def _contents(self, jobs: Sequence[GenerationJob]) -> list[PromptContent]:
        return [self.contents[job.prompt_index] for job in jobs]

    def _pass(self, jobs: Sequence[GenerationJob], assigned: AssignedPlan, capture: Capture) -> list[tuple[int, ...]]:
        prompts = [job.prompt for job in jobs]
        for job in jobs:
            self._read_positions(job, job.prompt)
        run = PlanRun(assigned.plan, len(jobs), self._contents(jobs))
        hooks = plan_hooks(run) + capture.hooks()
        backend = exact_backend(self.bridge, hooks)
        rows = fresh_rows(backend.model, run, [len(prompt) for prompt in prompts], "step")
        last = max(point.layer for point in (*self.points, *run.hook_points))
        if backend.name == "fast" and last < self.bridge.cfg.n_layers - 1:
            hooks.append((HookPoint(last, "resid_post").name, _end_the_pass))
        with backend.attached(hooks), suppress(_PassEnded):
            rows.extend(*left_padded(prompts), keep=1)
        self.receipts.update(job_receipts(run, jobs, prompts, assigned.given_hash))
        return prompts

    def _generate(
        self, jobs: Sequence[GenerationJob], assigned: AssignedPlan, capture: Capture
    ) -> list[tuple[int, ...]]:
        task = GenerationTask(self.bridge, self.tokenizer, self.policy, self.rules, contents=self.contents)
        task.run(jobs, assigned, capture.hooks)
        self.receipts.update(task.receipts)
        for job in jobs:
            self.completions[job.row_index] = tuple(task.outputs[job.row_index].token_ids)
            if task.outputs[job.row_index].finish_reason == "error":
                raise task.failure(f"The logits of prompt {job.prompt_index}", steered=bool(len(assigned.plan)))
        return [ran_tokens(job, task.outputs[job.row_index]) for job in jobs]

    def _read_positions(self, job: GenerationJob, token_ids: Sequence[int]) -> tuple[int, ...]:
        marks = marks_for([self.where], self._contents([job]))
        rows = RowPositions.of_tokens([token_ids], [len(job.prompt)], marks)
        chosen = self.where.resolve(rows)[0].nonzero()[:, 0].tolist()
        if not chosen:
            raise InputError(
                f"{self.where} selects no token in prompt {job.prompt_index} of {len(job.prompt)} tokens "
                f"({len(token_ids)} were run); nothing can be read there."
            )
        return tuple(chosen)

    def activations(self, site: str, jobs: Sequence[GenerationJob]) -> Activations:
        """What was read, in order of the prompts."""
        join = torch.cat if self.pool is None else torch.stack
        return Activations(
            site=site,
            layers=tuple(point.layer for point in self.points),
            values=tuple(join([self.values[point][job.row_index] for job in jobs]) for point in self.points),
            positions=tuple(self.positions[job.row_index] for job in jobs),
            pool=self.pool,
            prompt_token_ids=tuple(job.prompt for job in jobs),
            completion_token_ids=tuple(self.completions.get(job.row_index, ()) for job in jobs),
            receipts=tuple(self.receipts[job.row_index] for job in jobs),
        )
