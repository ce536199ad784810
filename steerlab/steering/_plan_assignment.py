"""Which plan each prompt of a call gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steerlab.core.engine import ModelInfo
from steerlab.core.errors import PlanError
from steerlab.steering.plan import Plan

PlanArgument = Plan | None | Sequence[Plan | None]

_UNSTEERED = Plan()


@dataclass(frozen=True)
class AssignedPlan:
    """A plan ready to run, and the hash of the plan the caller gave.

    Attributes:
        plan: checked against the model, doses resolved; without edits for the unsteered arm.
        given_hash: hash of the plan as given; None for the unsteered arm.
    """

    plan: Plan
    given_hash: str | None


def assign_plans(
    plan: PlanArgument,
    n_prompts: int,
    info: ModelInfo,
    median_norm: Callable[[int, str], float],
    tokenizer: Any = None,
) -> list[AssignedPlan]:
    """One plan per prompt, from one for all or a list.

    Args:
        plan: one, a list with one per prompt, or None.
        n_prompts: how many prompts.
        info: the model.
        median_norm: of its stream, by layer and site.
        tokenizer: its own, for events that are named by their text.

    Raises:
        PlanError: for a list of another length, something that is not a plan, or an edit that leaves the finite range.
        HookPointError, VectorShapeError: for a plan that does not fit the model.
    """
    given: list[Any] = list(plan) if isinstance(plan, list | tuple) else [plan] * n_prompts
    if len(given) != n_prompts:
        raise PlanError(f"A list of plans holds one per prompt: got {len(given)} plans for {n_prompts} prompts.")
    ready: dict[Any, AssignedPlan] = {}
    for one in given:
        if one is not None and not isinstance(one, Plan):
            raise PlanError(
                f"plan takes a Plan, None, or a list of them, got {type(one).__name__}; wrap edits in Plan()."
            )
        if plan_key(one) not in ready:
            checked = _UNSTEERED if one is None else one.ready(info, median_norm, tokenizer)
            ready[plan_key(one)] = AssignedPlan(checked, None if one is None else one.hash)
    return [ready[plan_key(one)] for one in given]


def plan_key(plan: Plan | None) -> Any:
    """The key of plans that run together: equal content and equal vector names."""
    return None if plan is None else (plan.hash, plan.vector_names)


def group_by_plan(assigned: Sequence[AssignedPlan]) -> list[tuple[AssignedPlan, list[int]]]:
    """Prompt indices that share a plan, in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(assigned):
        groups.setdefault((one.given_hash, one.plan.vector_names), []).append(index)
    return [(assigned[indices[0]], indices) for indices in groups.values()]
