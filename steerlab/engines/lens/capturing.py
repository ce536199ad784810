"""Reading activations: gathered, and pooled if asked, inside the hook."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from steerlab.core.hook_points import HookPoint
from steerlab.steering.run import PlanRun
from steerlab.steering.where import RowPositions, Where


class Capture:
    """Collects one site's activations of a batch that runs as one whole pass.

    Args:
        points: the hook points to read.
        where: the positions to read.
        pool: `mean` or `last` over the positions read, or None.
    """

    def __init__(self, points: Sequence[HookPoint], where: Where, pool: str | None) -> None:
        self.points = list(points)
        self.where = where
        self.pool = pool
        self.values: dict[HookPoint, list[Tensor]] = {}
        self._mask: Tensor | None = None

    def begin(self, rows: RowPositions) -> None:
        """States which tokens the coming pass holds."""
        self._mask = self.where.resolve(rows)

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        """(hook name, function) pairs that read and change nothing."""
        return [(point.name, self._reader(point)) for point in self.points]

    def _reader(self, point: HookPoint) -> Callable[..., Any]:
        def read(value: Tensor, hook: Any = None) -> None:
            assert self._mask is not None
            self.values[point] = [_pooled(row, self.pool) for row in _rows_of(value, self._mask.to(value.device))]

        return read


def _rows_of(value: Tensor, mask: Tensor) -> list[Tensor]:
    return [row[chosen].detach().to("cpu", torch.float32) for row, chosen in zip(value, mask, strict=True)]


def _pooled(row: Tensor, pool: str | None) -> Tensor:
    if pool is None:
        return row
    return row.mean(dim=0) if pool == "mean" else row[-1]


def plan_hooks(run: PlanRun) -> list[tuple[str, Callable[..., Any]]]:
    """(hook name, function) pairs that carry out a plan."""

    def editor(point: HookPoint) -> Callable[..., Any]:
        def edit(value: Tensor, hook: Any = None) -> Tensor:
            return run.edit(point, value)

        return edit

    return [(point.name, editor(point)) for point in run.hook_points]
