"""A plan as the operator runs it: edits, terms and directions per wired hook point, and positions per request.

The edits of one hook point act in the plan's order, each seeing the result of the one before. All are of one form, see
`steerlab.engines.vllm.wire.plan_tables`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import numpy as np

from steerlab.core.errors import PlanError
from steerlab.core.hook_points import HookPoint
from steerlab.engines.vllm.client.position_runs import Selection
from steerlab.engines.vllm.wire.config import SteeringConfig
from steerlab.engines.vllm.wire.plan_tables import EDIT_WIDTH, TERM_WIDTH, PlanTables
from steerlab.steering.operators.edit import Edit
from steerlab.steering.operators.form import Term
from steerlab.steering.plan import Plan
from steerlab.steering.positions.schedule import Curve

Label: TypeAlias = tuple[str, int, str, str | None]


@dataclass(frozen=True)
class CompiledPlan:
    """A plan's edits in the operator's terms; entry e belongs to the plan's edit e.

    Attributes:
        fingerprint: content hash of `tables`.
        tables: what the workers hold.
        selections: the plan's distinct sets of positions; `tables.groups` says which belongs to an edit.
        labels: hook point, layer, operator and vector of each edit, as receipts name them.
        counts_generated: whether strengths depend on how many tokens have been generated.
    """

    fingerprint: str
    tables: PlanTables
    selections: tuple[Selection, ...]
    labels: tuple[Label, ...] = ()
    counts_generated: bool = False

    @property
    def groups(self) -> list[int]:
        """Per edit, which of a request's sets of positions it takes."""
        return self.tables.groups.tolist()


def compile_plan(plan: Plan, config: SteeringConfig) -> CompiledPlan:
    """The plan for a wired engine.

    Args:
        plan: with its doses resolved.
        config: what is wired.

    Raises:
        PlanError: for an edit at a layer or site that is not wired, an operator without terms or with a condition, or
            more directions at one hook point than there is room for; the message names what to change.
    """
    for edit in plan:
        _check_form(edit)
    points = [wired_point(edit.hook_point, config) for edit in plan]
    selections = tuple(dict.fromkeys(Selection(edit.where, edit.schedule) for edit in plan))
    groups = [selections.index(Selection(edit.where, edit.schedule)) for edit in plan]
    tables = _tables(plan, points, groups)
    _check_room(tables, config)
    digest = hashlib.sha256()
    for part in tables.content():
        digest.update(part)
    return CompiledPlan(
        digest.hexdigest()[:32],
        tables,
        selections,
        tuple(map(_label, plan)),
        any(edit.schedule is not None for edit in plan),
    )


def wired_point(point: HookPoint, config: SteeringConfig) -> int:
    """Which of the wired hook points a hook point is.

    Raises:
        PlanError: if its layer or site is not wired.
    """
    if point.site == "resid_pre" and point.layer == 0:
        raise PlanError(
            f"{point.name} cannot be reached inside vLLM, which steers after and inside layers: resid_pre of any layer "
            "but the first is resid_post of the one before. Use the TransformerLens engine for it."
        )
    same = HookPoint(point.layer - 1, "resid_post") if point.site == "resid_pre" else point
    if same in config.points:
        return config.points.index(same)
    started, needed = [], []
    if same.layer not in config.layers:
        started.append(f"layers={list(config.layers)}")
        needed.append(f"layers={sorted({*config.layers, same.layer})}")
    if same.site not in config.sites:
        started.append(f"sites={list(config.sites)}")
        needed.append(f"sites={[*config.sites, same.site]}")
    raise PlanError(
        f"{point.name} is not wired: this engine was started with {' and '.join(started)}. Start it with "
        f"{', '.join(needed)}."
    )


def _check_form(edit: Edit) -> None:
    if not edit.operator.has_formula:
        raise PlanError(
            f"{edit} cannot run inside vLLM: its operator states no terms. Use the TransformerLens engine for it."
        )
    if edit.when is not None:
        raise PlanError(f"{edit} cannot run inside vLLM: it has a condition. Use the TransformerLens engine for it.")


def _tables(plan: Plan, points: Sequence[int], groups: Sequence[int]) -> PlanTables:
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
        rows[e] = (first, len(terms), edit.norm == "keep", edit.scale, *curve)
    return PlanTables(
        points=np.array(points, dtype=np.int64),
        places=np.array(places, dtype=np.int64),
        groups=np.array(groups, dtype=np.int64),
        edits=rows,
        term_points=np.array([point for point, _ in made.terms], dtype=np.int64),
        terms=np.array([row for _, row in made.terms], dtype=np.float32).reshape(-1, TERM_WIDTH),
        vector_points=np.array([point for point, _ in made.vectors], dtype=np.int64),
        vectors=np.stack([vector for _, vector in made.vectors]),
    )


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

    def _place(self, point: int, direction: np.ndarray) -> int:
        values = direction.astype(np.float32)
        key = (point, values.tobytes())
        if key not in self.known:
            self.known[key] = sum(other == point for other, _ in self.vectors)
            self.vectors.append((point, values))
        return self.known[key]


def _check_room(tables: PlanTables, config: SteeringConfig) -> None:
    for point in dict.fromkeys(tables.points.tolist()):
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
