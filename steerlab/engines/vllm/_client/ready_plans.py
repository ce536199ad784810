"""Plans of a call made ready: checked, resolved and compiled, each row by itself, so that a bad one can fail alone."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import PlanError, SteerlabError
from steerlab.engines.vllm._client.compiled_plan import CompiledPlan, compile_plan
from steerlab.engines.vllm._client.position_runs import Row, resolve
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens
from steerlab.steering._plan_assignment import AssignedPlan, PlanArgument, assign_plans, plan_key
from steerlab.steering.plan import Plan

KEPT_PLANS = 1024
"""How many plans an engine keeps ready."""


@dataclass(frozen=True)
class ReadyPlan:
    """A plan that can run on this engine.

    Attributes:
        assigned: the plan, doses resolved, and its hash as given.
        compiled: the same in the operator's terms; None without edits.
    """

    assigned: AssignedPlan
    compiled: CompiledPlan | None


@dataclass
class Planner:
    """Makes plans ready; each distinct plan once.

    Attributes:
        config: what is wired.
        info: the model.
        median_norm: of the stream, by layer and site.
        kept: plans made ready earlier, the longest unused first; an engine keeps them from call to call.
        tokenizer: the model's own, for events that are named by their text.
    """

    config: SteeringConfig
    info: ModelInfo
    median_norm: Callable[[int, str], float]
    kept: OrderedDict[Any, ReadyPlan] = field(default_factory=OrderedDict)
    tokenizer: Any = None
    _failed: dict[Any, SteerlabError] = field(default_factory=dict)

    def plans(self, plan: PlanArgument, n_prompts: int) -> list["ReadyPlan | SteerlabError"]:
        """One plan per prompt, or what is wrong with it.

        Raises:
            PlanError: for a list of another length, or something that is not a plan.
        """
        if not isinstance(plan, list | tuple):
            return [self._ready(plan)] * n_prompts
        given: list[Any] = list(plan)
        if len(given) != n_prompts:
            raise PlanError(f"A list of plans holds one per prompt: got {len(given)} plans for {n_prompts} prompts.")
        return [self._ready(one) for one in given]

    def _ready(self, plan: Any) -> "ReadyPlan | SteerlabError":
        key = plan_key(plan) if isinstance(plan, Plan | None) else object()  # no plan is like what is none
        if key in self._failed:
            return self._failed[key]
        if key not in self.kept:
            try:
                self.kept[key] = self._make(plan)
            except SteerlabError as error:
                self._failed[key] = error
                return error
        self.kept.move_to_end(key)
        while len(self.kept) > KEPT_PLANS:
            self.kept.popitem(last=False)
        return self.kept[key]

    def _make(self, plan: Any) -> ReadyPlan:
        (assigned,) = assign_plans([plan], 1, self.info, self.median_norm, self.tokenizer)
        return ReadyPlan(assigned, compile_plan(assigned.plan, self.config) if len(assigned.plan) else None)

    def positions(self, compiled: CompiledPlan | None, row: Row) -> tuple[Runs | RunsByTokens, ...]:
        """The positions of each group of a plan's edits in a row, and then those that each condition reads.

        Raises:
            PlanError: if they cannot be known, or do not fit.
        """
        if compiled is None:
            return ()
        first_read = len(compiled.selections) - len(compiled.tables.conditions)
        edited, read = compiled.selections[:first_read], compiled.selections[first_read:]
        places = resolve(edited, row, self.config.max_runs, compiled.followed)
        readings = resolve(read, row, self.config.max_runs)
        for selection, runs in zip(read, readings, strict=True):
            if not runs:
                raise PlanError(
                    f"A condition reads {selection}, which selects no token in prompt {row.content.index}; read "
                    "positions that every prompt has."
                )
        return places + readings
