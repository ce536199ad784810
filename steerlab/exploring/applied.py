"""A plan on a model of the user's own, for as long as a `with` block runs: a Hugging Face model, or a bridge.

The plan follows the model's own calls. A call without a filled cache starts new rows, whose tokens are the prompt; what
comes after them is generated: one token a call, or the whole row again with `use_cache=False`. Padding is what the
attention mask says.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from steerlab._runtime.capturing import edit_pairs
from steerlab._runtime.hooks import alone, install_input_hook, install_output_hook
from steerlab._runtime.model_parts import find_parts
from steerlab.core._hook_points import HookPoint
from steerlab.core.errors import PlanError
from steerlab.core.receipts import EditReceipt, Receipt, Receipts, mean_change, warn_if_idle
from steerlab.display import Piece, Shown
from steerlab.engines.lens._hooking import add_hook, find_hook_point
from steerlab.sequences._plan_resolver import PlanResolver
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan
from steerlab.steering.positions._prompt_lookup import PromptContent
from steerlab.steering.positions._rows import RowPositions
from steerlab.steering.positions._sets import Span

_Install: TypeAlias = Callable[[ExitStack, "AppliedPlan"], None]


@contextmanager
def applied(plan: Plan, model: Any, tokenizer: Any = None) -> "Iterator[AppliedPlan]":
    """See `steerlab.steering.plan.Plan.applied`."""
    if any(isinstance(leaf, Span) for where in plan.sets for leaf in where.leaves()):
        raise PlanError("span positions look at the prompt's text, which a model is not given; name index positions.")
    find = _on_bridge if hasattr(model, "original_model") else _on_plain_model
    with _paused():
        target, ready, install = find(plan, model, tokenizer)
    following = AppliedPlan(ready, plan.hash)
    with alone(target), ExitStack() as stack:
        stack.callback(target.register_forward_pre_hook(following.follow, with_kwargs=True, prepend=True).remove)
        install(stack, following)
        _active().append(following)
        stack.callback(_active().remove, following)
        yield following
    if following.receipts:
        warn_if_idle(following.receipts)


class AppliedPlan(Shown):
    """A plan at work on a model, and what it has edited so far.

    Attributes:
        plan: the plan as it runs, its doses resolved.
        given_hash: hash of the plan as it was given.
        is_paused: whether calls of the model are left alone, because it is looked at for another plan.
    """

    def __init__(self, plan: Plan, given_hash: str) -> None:
        self.plan, self.given_hash = plan, given_hash
        self.is_paused = False
        self._rows: _Rows | None = None
        self._done: list[Receipt] = []

    @property
    def receipts(self) -> Receipts:
        """One per row that ran, in order of the calls; a row that is continued has one for all its calls.

        Raises:
            ReceiptError: if an edit reached other tokens than it should have.
        """
        now = [] if self._rows is None else self._rows.receipts(len(self._done), self.given_hash)
        return Receipts([*self._done, *now])

    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes note of the tokens of a call of the model that begins; a forward pre-hook."""
        if self.is_paused:
            return
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        ids, embeds, mask = (given.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
        tokens = ids if ids is not None else embeds
        if tokens is None:
            raise PlanError("The model was called without input_ids or inputs_embeds; a plan cannot follow that.")
        if given.get("cache_params") is not None:
            raise PlanError("A plan cannot follow a model whose cache is a running state; use sl.load and its calls.")
        known = None if ids is None else ids.detach().cpu()
        valid = _valid(mask, *tokens.shape[:2])
        cache = given.get("past_key_values")
        goes_on = cache is not None and int(cache.get_seq_length()) > 0
        if goes_on and (self._rows is None or len(self._rows) != len(valid)):
            raise PlanError("The model goes on from a cache that was filled elsewhere; run its prompt in the block.")
        repeats = given.get("use_cache") is False and self._rows is not None and self._rows.are_repeated(known, valid)
        if self._rows is None or not (goes_on or repeats):
            self._done = list(self.receipts)
            self._rows = _Rows(self.plan, valid)
        self._rows.begin(known, valid, again=not goes_on)

    def edit(self, point: HookPoint, value: Tensor) -> Tensor:
        """The stream at a hook point after the plan's edits there."""
        if self.is_paused:
            return value
        if self._rows is None:
            raise PlanError("A layer ran outside a call of the model itself; call the model, not its decoder.")
        return self._rows.run.edit(point, value)

    def _finding(self) -> str:
        return f"{self.given_hash}: {self.receipts._finding()}"

    def _pieces(self) -> Sequence[Piece]:
        return [*self.plan._pieces(), *self.receipts._pieces()]


_threads = threading.local()


def _active() -> list[AppliedPlan]:
    if not hasattr(_threads, "plans"):
        _threads.plans = []
    return _threads.plans


@contextmanager
def _paused() -> Iterator[None]:
    """Runs the body, which looks at a model, without the plans that are applied around it."""
    plans = [plan for plan in _active() if not plan.is_paused]
    try:
        for plan in plans:
            plan.is_paused = True
        yield
    finally:
        for plan in plans:
            plan.is_paused = False


class _Rows:
    """Rows of a batch that the model's calls make longer, and the plan's run on them."""

    def __init__(self, plan: Plan, valid: Tensor) -> None:
        self.run = PlanRun(plan, len(valid), [PromptContent(row, len(valid), ()) for row in range(len(valid))])
        self._prompt_lens = valid.sum(dim=1)
        self._seen = torch.zeros_like(self._prompt_lens)
        self._expected: list[Tensor] = []
        self._ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self._prompt_lens)

    def are_repeated(self, ids: Tensor | None, valid: Tensor) -> bool:
        """Whether a call holds these rows whole with a token more, as a model runs them that keeps no cache."""
        if ids is None or self._ids is None or ids[:, :-1].shape != self._ids.shape:
            return False
        return torch.equal(ids[:, :-1], self._ids) and bool(valid[:, -1].all())

    def begin(self, ids: Tensor | None, valid: Tensor, *, again: bool) -> None:
        """Tells the run which tokens the call holds; `again` if it holds every row from its first token."""
        before = torch.zeros_like(self._seen) if again else self._seen
        positions = before[:, None] + valid.cumsum(dim=1) - 1
        fresh = positions >= self._seen[:, None]
        self._seen, self._ids = before + valid.sum(dim=1), ids if again else None
        rows = RowPositions(positions.masked_fill(~valid, -1), self._prompt_lens, token_ids=ids, fresh=fresh)
        marked = self.run.begin(rows)
        chosen = [rows.among_fresh(edit.selects(marked)).sum(dim=1) for edit in self.run.plan]
        self._expected.append(torch.stack([*chosen, torch.zeros_like(self._seen)]))

    def receipts(self, first_row: int, plan_hash: str) -> list[Receipt]:
        """Checked receipts of the rows; where a condition decides, what was edited is what was expected."""
        edited, changes = self.run.counts()
        expected = torch.stack(self._expected).sum(dim=0)
        made = []
        for row in range(len(self)):
            entries = tuple(
                EditReceipt(
                    hook_point=edit.hook_point.name,
                    layer=edit.hook_point.layer,
                    operator=edit.operator.told(edit.scale),
                    edited=int(edited[k, row]),
                    expected=int((expected if edit.when is None else edited)[k, row]),
                    mean_relative_change=mean_change(float(changes[k, row]), int(edited[k, row])),
                    vector=edit.vector.name,
                )
                for k, edit in enumerate(self.run.plan)
            )
            made.append(Receipt(row, first_row + row, plan_hash, entries).check())
        return made


def _on_plain_model(plan: Plan, model: Any, tokenizer: Any) -> tuple[Any, Plan, _Install]:
    """A Hugging Face model, the plan resolved on it, and how its layers are hooked."""
    if not isinstance(model, nn.Module) or hasattr(model, "hook_dict"):
        raise PlanError(
            "A plan is applied to a Hugging Face causal language model or a TransformerBridge, got "
            f"{type(model).__name__}. An engine takes it in its calls: engine.generate(prompts, plan=plan)."
        )
    parts = find_parts(model)
    open_dose = any(edit.needs_median_norm and edit.median_norm is None for edit in plan)
    known = _own_tokenizer(parts.causal) if open_dose and tokenizer is None else tokenizer
    if open_dose and known is None:
        raise PlanError(
            "A dose is measured on text, and the model came with no tokenizer: pass applied(model, tokenizer), or give "
            "coef= instead of dose=."
        )
    resolver = PlanResolver(parts, known)
    (assigned,) = resolver.assign(plan, 1)

    def install(stack: ExitStack, following: AppliedPlan) -> None:
        for point in _points(assigned.plan):
            put = install_input_hook if point.site == "resid_pre" else install_output_hook

            def edit(value: Tensor, point: HookPoint = point) -> Tensor:
                return following.edit(point, value)

            stack.callback(put(resolver.layers[point.layer], edit).remove)

    return parts.causal, assigned.plan, install


def _on_bridge(plan: Plan, bridge: Any, tokenizer: Any) -> tuple[Any, Plan, _Install]:
    """A TransformerBridge, the plan resolved on it, and how its hook points are hooked."""
    from steerlab.engines.loading import load

    engine = load(bridge, tokenizer=tokenizer)
    ready = plan.ready(engine.info, engine.median_norm, engine.tokenizer)

    def install(stack: ExitStack, following: AppliedPlan) -> None:
        for name, function in edit_pairs(_points(ready), following.edit):
            stack.callback(add_hook(find_hook_point(bridge, name), function))

    return bridge.original_model, ready, install


def _points(plan: Plan) -> list[HookPoint]:
    """What conditions read, then what edits change."""
    return list(dict.fromkeys([condition.hook_point for condition in plan.conditions] + plan.hook_points))


def _own_tokenizer(model: Any) -> Any:
    """The tokenizer from where a model came, if it is on this computer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(getattr(model, "name_or_path", "")), local_files_only=True)
    except (OSError, ValueError):
        return None


def _valid(mask: Any, n_rows: int, width: int) -> Tensor:
    """Which of a call's tokens are no padding, [batch, pos] on the CPU."""
    if mask is None:
        return torch.ones(n_rows, width, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise PlanError("A plan follows calls whose attention_mask is [batch, tokens]; this one has another form.")
    return mask.detach().cpu().bool()[:, -width:]
