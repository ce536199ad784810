"""Several plans on the same prompts: what none of them edits runs once.

By default a plan begins at a prompt's last token, so the many doses and directions of an effect would run the same
tokens over and over. Instead, every context runs up to its last token without a plan, and each plan that leaves these
tokens alone goes on from there. The others run in the same two steps by themselves: rounding is the same for all, and
no plan's numbers depend on what else a call holds.
"""

from collections.abc import Sequence

from steerlab._runtime.backend import HookedModel
from steerlab._runtime.capturing import plan_hooks
from steerlab._runtime.contexts import Budget, Tokens, extend_in_blocks, prefix_row
from steerlab._runtime.growth import AnyRows, growth_of
from steerlab._runtime.rows import Rows
from steerlab._runtime.shared_prefix import edits_from_the_last_token
from steerlab._runtime.teacher_forcing import ForcedPair, TeacherForcing
from steerlab.core._batching import batches_by_tokens
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan

Task = tuple[TeacherForcing, Sequence[ForcedPair]]


def run_together(tasks: Sequence[Task]) -> None:
    """Measures the pairs of every task; the tasks are those of one call on one model."""
    together: dict[tuple[Tokens, ...], list[Task]] = {}
    for task, pairs in tasks:
        plan, begun = task.assigned.plan, [pair for pair in pairs if len(pair.context_ids) > 1]
        lead = 0 if plan.conditions or not growth_of(task.model.exact_backend([]).model).blocks else 1
        if not lead or not begun or not _can_go_on(task, begun):
            task.run(pairs, lead)
            continue
        task.run([pair for pair in pairs if len(pair.context_ids) == 1], lead)
        together.setdefault(tuple(dict.fromkeys(_beginning(pair) for pair in begun)), []).append((task, begun))
    for beginnings, sharing in together.items():
        _run_sharing(beginnings, sharing)


def _beginning(pair: ForcedPair) -> Tokens:
    return pair.context_ids[:-1]


def _can_go_on(task: TeacherForcing, pairs: Sequence[ForcedPair]) -> bool:
    """Whether a task's rows can continue ones that ran without its plan."""
    plan, model = task.assigned.plan, task.model
    if not edits_from_the_last_token(plan, {len(pair.context_ids) for pair in pairs}):
        return False
    return model.exact_backend(plan_hooks(PlanRun(plan, 1))).model is model.exact_backend([]).model


def _run_sharing(beginnings: Sequence[Tokens], tasks: Sequence[Task]) -> None:
    """Runs each beginning once, and every task from there."""
    model, budget = tasks[0][0].model, tasks[0][0].budget
    pairs_of: list[dict[Tokens, list[ForcedPair]]] = [{} for _ in tasks]
    for found, (_, pairs) in zip(pairs_of, tasks, strict=True):
        for pair in pairs:
            found.setdefault(_beginning(pair), []).append(pair)
    prefix = prefix_row(model, Plan(), beginnings, budget)
    done = 0 if prefix is None else prefix.n_tokens
    costs = [budget.cost(len(tokens) - done, done) for tokens in beginnings]
    for batch in batches_by_tokens(costs, budget.tokens):
        chosen = [beginnings[index] for index in batch]
        begun = _begun(model, chosen, prefix, budget)
        for found, (task, _) in zip(pairs_of, tasks, strict=True):
            task.go_on(begun, [(row, pair) for row, tokens in enumerate(chosen) for pair in found[tokens]])


def _begun(model: HookedModel, beginnings: Sequence[Tokens], prefix: AnyRows | None, budget: Budget) -> Rows:
    """Rows that have run these tokens, each all of a context but its last one."""
    backend = model.exact_backend([])
    lens = [len(tokens) + 1 for tokens in beginnings]
    if prefix is None:
        rows, done = Rows(backend.model, PlanRun(Plan(), len(lens)), lens), 0
    else:
        rows, done = prefix.selected([0] * len(lens), lens), prefix.n_tokens
    assert isinstance(rows, Rows)  # which grow by blocks
    with backend.attached([]):
        extend_in_blocks(rows, [tokens[done:] for tokens in beginnings], budget)
    return rows
