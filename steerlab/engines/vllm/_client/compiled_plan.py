"""A plan as the workers' custom operator takes it: edits, terms and directions per wired hook point, and positions.

The edits of one hook point act in the plan's order, each seeing the result of the one before. All are of one form, see
`steerlab.engines.vllm._wire.plan_tables`.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError
from steerlab.engines._wired_points import reached_at
from steerlab.engines.vllm._client.position_runs import Selection
from steerlab.engines.vllm._wire.config import MOST_CONDITIONS, SteeringConfig
from steerlab.engines.vllm._wire.plan_tables import (
    ABOVE,
    ASKS,
    BELOW,
    CONDITION_WIDTH,
    EDIT_WIDTH,
    TERM_WIDTH,
    TRUTH,
    PlanTables,
    passes,
)
from steerlab.engines.vllm._wire.rule_tables import fits, limit_table, sequence_table
from steerlab.steering.operators._edit import Edit
from steerlab.steering.operators._form import Term
from steerlab.steering.plan import Plan
from steerlab.steering.positions._by_tokens import ByTokens, by_tokens
from steerlab.steering.positions._sets import Prompt
from steerlab.steering.positions.condition import Condition
from steerlab.steering.positions.schedule import Curve

Label: TypeAlias = tuple[str, int, str, str | None]


@dataclass(frozen=True)
class CompiledPlan:
    """A plan's edits in the operator's terms; entry e belongs to the plan's edit e.

    Attributes:
        fingerprint: content hash of `tables`.
        tables: what the workers hold.
        selections: the plan's distinct sets of positions, of which `tables.groups` says which belongs to an edit, and
            then what each condition reads.
        labels: hook point, layer, operator and vector of each edit, as receipts name them.
        counts_generated: whether strengths depend on how many tokens have been generated.
        followed: the sets that workers follow token by token, in the order of their rules.
    """

    fingerprint: str
    tables: PlanTables
    selections: tuple[Selection, ...]
    labels: tuple[Label, ...] = ()
    counts_generated: bool = False
    followed: tuple[ByTokens, ...] = ()

    @cached_property
    def groups(self) -> list[int]:
        """Per edit, which of a request's sets of positions it takes."""
        return self.tables.groups.tolist()

    def answers(self, read: np.ndarray) -> list[bool | None]:
        """Per edit whether its condition passed; None without one.

        Args:
            read: sum and count of what each condition read, [conditions, 2].
        """
        limits = self.tables.conditions
        if not len(limits):
            return [None] * len(self.labels)
        passed = passes(read[:, 0], read[:, 1], limits[:, ABOVE], limits[:, BELOW])
        index = sum(1 << place for place, answer in enumerate(passed.tolist()) if answer)
        asked = self.tables.edits[:, [ASKS, TRUTH]].astype(np.int64).tolist()
        return [bool(truth >> index & 1) if asks else None for asks, truth in asked]


def compile_plan(plan: Plan, config: SteeringConfig) -> CompiledPlan:
    """The plan for a wired engine.

    Args:
        plan: with its doses resolved.
        config: what is wired.

    Raises:
        PlanError: for an edit or a probe at a layer or site that is not wired, an operator without terms, or more
            conditions, or directions at one hook point, than there is room for; the message names what to change.
    """
    _check_forms(plan, config)
    points = [wired_point(edit.hook_point, config) for edit in plan]
    selections = tuple(dict.fromkeys(Selection(edit.where, edit.schedule) for edit in plan))
    groups = [selections.index(Selection(edit.where, edit.schedule)) for edit in plan]
    followed = _followed(plan, config)
    tables = _tables(plan, points, groups, followed, config)
    _check_room(tables, config)
    digest = hashlib.sha256()
    for part in tables.content():
        digest.update(part)
    return CompiledPlan(
        digest.hexdigest()[:32],
        tables,
        selections + tuple(Selection(condition.read & Prompt()) for condition in plan.conditions),
        tuple(map(_label, plan)),
        any(edit.schedule is not None for edit in plan),
        followed,
    )


def wired_point(point: HookPoint, config: SteeringConfig) -> int:
    """Which of the wired hook points a hook point is.

    Raises:
        PlanError: if its layer or site is not wired.
    """
    return config.points.index(reached_at(point, config.layers, config.sites))


def _check_forms(plan: Plan, config: SteeringConfig) -> None:
    """Checks operators and conditions."""
    for edit in plan:
        if not edit.operator.has_formula:
            raise PlanError(
                f"{edit} cannot run inside vLLM: its operator states no terms. Use the TransformerLens engine for it."
            )
    wanted = len(plan.conditions)
    if wanted > config.max_conditions:
        raise PlanError(
            f"The plan has {wanted} conditions; this engine was started with max_conditions={config.max_conditions}. "
            f"Start it with max_conditions={wanted} (at most {MOST_CONDITIONS})."
        )
    for condition in plan.conditions:
        point = condition.hook_point
        if point.site == "resid_pre" and HookPoint(point.layer - 1, "resid_post") in plan.hook_points:
            raise PlanError(
                f"The condition [{condition}] is read after the plan's edits at resid_post of the layer before, and "
                "inside vLLM both are one hook point, read before its edits. Read it at a later site."
            )


def _followed(plan: Plan, config: SteeringConfig) -> tuple[ByTokens, ...]:
    """The sets that workers follow; one that does not fit can be looked up in a prompt, but not while generating."""
    found = [leaf for leaf in by_tokens(edit.where for edit in plan) if fits(leaf.rule)]
    return tuple(found[: config.max_token_rules])


def _tables(
    plan: Plan, points: Sequence[int], groups: Sequence[int], followed: Sequence[ByTokens], config: SteeringConfig
) -> PlanTables:
    """Edits of one hook point in the order they act: all of a layer's resid_post, then the next layer's resid_pre."""
    order = sorted(range(len(points)), key=lambda e: (points[e], plan.edits[e].hook_point.site == "resid_pre", e))
    made = _Made({}, [], [])
    places, rows = [0] * len(points), np.zeros((len(points), EDIT_WIDTH), dtype=np.float32)
    taken: dict[int, int] = {}
    for e in order:
        places[e] = taken.setdefault(points[e], 0)
        taken[points[e]] += 1
        edit, terms = plan.edits[e], plan.edits[e].terms()
        first = sum(point == points[e] for point, _ in made.terms)
        made.terms.extend((points[e], made.row(points[e], term)) for term in terms)
        curve = Curve() if edit.schedule is None else edit.schedule.curve
        asks, truth = _asked(edit, plan.conditions)
        rows[e] = (first, len(terms), edit.norm == "keep", edit.scale, *curve, asks, truth)
    read_at = [wired_point(condition.hook_point, config) for condition in plan.conditions]
    conditions = [made.condition(*pair) for pair in zip(read_at, plan.conditions, strict=True)]
    return PlanTables(
        points=np.array(points, dtype=np.int64),
        places=np.array(places, dtype=np.int64),
        groups=np.array(groups, dtype=np.int64),
        edits=rows,
        term_points=np.array([point for point, _ in made.terms], dtype=np.int64),
        terms=np.array([row for _, row in made.terms], dtype=np.float32).reshape(-1, TERM_WIDTH),
        vector_points=np.array([point for point, _ in made.vectors], dtype=np.int64),
        vectors=np.stack([vector for _, vector in made.vectors]),
        condition_points=np.array(read_at, dtype=np.int64),
        conditions=np.array(conditions, dtype=np.float32).reshape(-1, CONDITION_WIDTH),
        rule_limits=limit_table([leaf.rule for leaf in followed]),
        rule_sequences=sequence_table([leaf.rule for leaf in followed]),
    )


def _asked(edit: Edit, conditions: Sequence[Condition]) -> tuple[int, int]:
    """As bits, which conditions an edit asks, and in which combinations of all answers it acts."""
    if edit.when is None:
        return 0, 0
    asks = sum(1 << place for place, condition in enumerate(conditions) if condition in edit.when.leaves)
    answers = [
        {condition: bool(index >> place & 1) for place, condition in enumerate(conditions)}
        for index in range(1 << len(conditions))
    ]
    return asks, sum(edit.when.joined(answer) << index for index, answer in enumerate(answers))


@dataclass(frozen=True)
class _Made:
    """Terms and directions so far; equal directions of one hook point are one."""

    known: dict[tuple[int, bytes], int]
    vectors: list[tuple[int, np.ndarray]]
    terms: list[tuple[int, tuple[float, ...]]]

    def row(self, point: int, term: Term) -> tuple[float, ...]:
        """A term as the table holds it."""
        read = -1 if term.read is None or term.gate.is_constant else self._place(point, term.read.numpy())
        return (read, self._place(point, term.write.numpy()), *astuple(term.gate), term.bias)

    def condition(self, point: int, condition: Condition) -> tuple[float, ...]:
        """A condition as the table holds it."""
        above = -math.inf if condition.above is None else condition.above
        below = math.inf if condition.below is None else condition.below
        probe = self._place(point, condition.probe.unit.numpy())
        return (probe, condition.reading == "cosine", above, below)

    def _place(self, point: int, direction: np.ndarray) -> int:
        values = direction.astype(np.float32)
        key = (point, values.tobytes())
        if key not in self.known:
            self.known[key] = sum(other == point for other, _ in self.vectors)
            self.vectors.append((point, values))
        return self.known[key]


def _check_room(tables: PlanTables, config: SteeringConfig) -> None:
    for point in dict.fromkeys([*tables.points.tolist(), *tables.vector_points.tolist()]):
        edits, terms, vectors = (
            int((which == point).sum()) for which in (tables.points, tables.term_points, tables.vector_points)
        )
        wanted = max(vectors, -(-max(edits, terms) // 2))
        if wanted > config.max_directions:
            raise PlanError(
                f"At {config.points[point].name} the plan has {edits} edits, {terms} terms and {vectors} directions; "
                f"this engine was started with max_directions={config.max_directions}. Start it with "
                f"max_directions={wanted}."
            )


def _label(edit: Edit) -> Label:
    return edit.hook_point.name, edit.hook_point.layer, edit.operator.told(edit.scale), edit.vector.name
