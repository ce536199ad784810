"""Reads activations: selects and pools them on the device they are computed on, and copies the result off it once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from steerlab._runtime.step import Step, current_step
from steerlab.core._hook_points import HeadPoint, HookPoint
from steerlab.core.errors import PlanError
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan
from steerlab.steering.positions import Marks, RowPositions
from steerlab.steering.positions._by_tokens import trail_of
from steerlab.steering.positions._prompt_lookup import PromptContent
from steerlab.steering.positions._sets import Where

HookPair = tuple[str, Callable[..., Any]]


class Capture:
    """Collects one site's activations of a batch of rows over all its passes.

    Args:
        points: the hook points to read, of the stream or of heads.
        where: the positions to read.
        pool: `mean` or `last` over the positions read, or None.
        n_rows: rows of the batch.
        marks: what the positions look up in the prompts, if they do.
    """

    def __init__(
        self,
        points: Sequence[HookPoint | HeadPoint],
        where: Where,
        pool: str | None,
        n_rows: int,
        marks: Marks | None = None,
    ) -> None:
        self.points = list(points)
        self._marks = marks
        self.where = where
        readers = {None: KeepAll, "mean": KeepMean, "last": KeepLast}
        self._readers = {point: readers[pool](n_rows) for point in self.points}
        self._shapes: dict[HookPoint | HeadPoint, Sequence[int]] = {}
        self._rows: Tensor | None = None
        self._rows_on: dict[torch.device, Tensor] = {}
        self._trail = trail_of([where], n_rows)
        self._given: RowPositions | None = None
        self._known: RowPositions | None = None

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        """(hook name, function) pairs that read and change nothing."""
        return [(point.name, self._hook(point)) for point in self.points]

    def _hook(self, point: HookPoint | HeadPoint) -> Callable[..., Any]:
        def read(value: Tensor, hook: Any = None) -> None:
            step = current_step()
            tokens = self._tokens_of(step)
            mask = tokens.among_fresh(self.where.resolve(tokens.on(value.device)))
            self._shapes[point] = value.shape[2:]
            self._readers[point].take(value.detach().flatten(2), mask, self._rows_of(step, value.device))

        return read

    def _tokens_of(self, step: Step) -> RowPositions:
        """A pass's tokens with what the positions look up, once a pass."""
        if step.tokens is not self._given or self._known is None:
            marked = step.tokens if self._marks is None else replace(step.tokens, marks=self._marks.rows(step.rows))
            self._given, self._known = step.tokens, self._trail.follow(marked, step.rows)
        return self._known

    def _rows_of(self, step: Step, device: torch.device) -> Tensor:
        """Which rows a pass holds; copied to a device once, and again when rows are dropped from the batch."""
        if step.rows is not self._rows:
            self._rows, self._rows_on = step.rows, {}
        if device not in self._rows_on:
            self._rows_on[device] = step.rows.to(device)
        return self._rows_on[device]

    def values(self, point: HookPoint | HeadPoint) -> list[Tensor]:
        """Per row, float32 on the CPU: [positions, d_model], or [d_model] if pooled; of heads [..., head, d_head]."""
        return [row.unflatten(-1, self._shapes[point]) for row in self._readers[point].values()]


class KeepAll:
    """Every value read, in order of position."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._values: list[Tensor] = []
        self._rows: list[Tensor] = []

    def take(self, value: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Reads a pass: value [batch, pos, d_model], mask [batch, pos], rows [batch]."""
        self._values.append(value[mask].to(torch.float32))
        self._rows.append(rows[:, None].expand_as(mask)[mask])

    def values(self) -> list[Tensor]:
        """Per row [positions, d_model]."""
        values, rows = torch.cat(self._values).cpu(), torch.cat(self._rows).cpu()
        return [values[rows == row] for row in range(self._n_rows)]


class KeepMean:
    """The mean of the values read."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._sum: Tensor | None = None
        self._count: Tensor | None = None

    def take(self, value: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Reads a pass: value [batch, pos, d_model], mask [batch, pos], rows [batch]."""
        if self._sum is None or self._count is None:
            self._sum = value.new_zeros(self._n_rows, value.shape[-1], dtype=torch.float32)
            self._count = value.new_zeros(self._n_rows, dtype=torch.float32)
        chosen = value.to(torch.float32).masked_fill(~mask[..., None], 0.0)
        self._sum.index_add_(0, rows, chosen.sum(dim=1))
        self._count.index_add_(0, rows, mask.sum(dim=1).to(torch.float32))

    def values(self) -> list[Tensor]:
        """Per row [d_model]; NaN where nothing was read."""
        assert self._sum is not None
        assert self._count is not None
        return list((self._sum / self._count[:, None]).cpu())


class KeepLast:
    """The last value read."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._last: Tensor | None = None

    def take(self, value: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Reads a pass: value [batch, pos, d_model], mask [batch, pos], rows [batch]."""
        if self._last is None:
            self._last = value.new_full((self._n_rows, value.shape[-1]), torch.nan, dtype=torch.float32)
        places = torch.arange(mask.shape[1], device=value.device)
        last = places.expand_as(mask).masked_fill(~mask, -1).amax(dim=1)
        found = value[torch.arange(len(rows), device=value.device), last.clamp_min(0)].to(torch.float32)
        self._last[rows] = torch.where((last >= 0)[:, None], found, self._last[rows])

    def values(self) -> list[Tensor]:
        """Per row [d_model]; NaN where nothing was read."""
        assert self._last is not None
        return list(self._last.cpu())


def plan_hooks(run: PlanRun) -> list[HookPair]:
    """(hook name, function) pairs that carry out a plan.

    TransformerLens hooks `resid_mid` where the MLP branch reads it, after the residual connection was taken. An
    edit there is therefore carried to the layer's output too, so that it is an edit of the stream.
    """
    return edit_pairs(run.hook_points, run.edit)


def whole_prompt_hooks(plan: Plan) -> list[HookPair]:
    """(hook name, function) pairs for calls that each hold whole prompts, without padding or cache.

    Raises:
        PlanError: for a condition that is read at another hook point than its edit.
    """
    for one in plan:
        if one.when is not None and any(leaf.hook_point != one.hook_point for leaf in one.when.leaves):
            raise PlanError(
                f"[{one}] has a condition read at another hook point, and a hook sees its own alone; use the engine's "
                "generate, score, capture or logits, or read the probe where the edit acts."
            )

    def edit(point: HookPoint, value: Tensor) -> Tensor:
        n_rows, n_pos = value.shape[:2]
        run = PlanRun(plan, n_rows, [PromptContent(row, n_rows, ()) for row in range(n_rows)])
        run.begin(RowPositions.of_rows([n_pos] * n_rows, [n_pos] * n_rows, value.device))
        return run.edit(point, value)

    return edit_pairs(plan.hook_points, edit)


def edit_pairs(points: Sequence[HookPoint], edit: Callable[[HookPoint, Tensor], Tensor]) -> list[HookPair]:
    """(hook name, function) pairs that call `edit` at each hook point."""
    middle = [pair for point in points if point.site == "resid_mid" for pair in _carrying(point, edit)]
    return middle + [(point.name, _editor(point, edit)) for point in points if point.site != "resid_mid"]


def _editor(point: HookPoint, edit: Callable[[HookPoint, Tensor], Tensor]) -> Callable[..., Any]:
    def hook(value: Tensor, hook: Any = None) -> Tensor:
        return edit(point, value)

    return hook


def _carrying(point: HookPoint, edit: Callable[[HookPoint, Tensor], Tensor]) -> list[HookPair]:
    """An edit at `resid_mid`, and its carriage past the MLP."""
    delta: list[Tensor] = []

    def change(value: Tensor, hook: Any = None) -> Tensor:
        edited = edit(point, value)
        delta.append(edited - value)
        return edited

    def carry(value: Tensor, hook: Any = None) -> Tensor:
        return value + delta.pop().to(value.device)

    return [(point.name, change), (HookPoint(point.layer, "resid_post").name, carry)]
