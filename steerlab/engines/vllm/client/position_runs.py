"""Positions as runs: what a plan's sets hold in one request, found before it is submitted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from steerlab.core.errors import PlanError
from steerlab.engines.vllm.wire.runs import Runs, runs_of
from steerlab.steering.operators.edit import chosen
from steerlab.steering.positions.prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions.rows import RowPositions
from steerlab.steering.positions.schedule import Schedule
from steerlab.steering.positions.sets import Ids, Marked, Where

KEPT_RUNS = 1024
"""Sets of positions that are kept, the longest unused dropped first."""


@dataclass(frozen=True)
class Selection:
    """The positions that an edit acts on: those of its set at which its schedule is not 0.

    Attributes:
        where: the set.
        schedule: the schedule.
    """

    where: Where
    schedule: Schedule | None = None

    def resolve(self, rows: RowPositions) -> Bool[Tensor, "batch pos"]:
        """Which tokens belong to them."""
        return chosen(self.where, self.schedule, rows)

    def __str__(self) -> str:
        return str(self.where)


@dataclass(frozen=True)
class Row:
    """The tokens that a request will run through the model.

    Attributes:
        token_ids: those that are known before it runs: the prompt, or prompt and target.
        prompt_len: how many of them are the prompt.
        length: how many tokens may run at most; those beyond `token_ids` are generated.
        content: the prompt they came from.
    """

    token_ids: tuple[int, ...]
    prompt_len: int
    length: int
    content: PromptContent


def resolve(selections: Sequence[Selection], row: Row, max_runs: int) -> tuple[Runs, ...]:
    """The positions of each selection in a row.

    Raises:
        PlanError: if positions depend on tokens that are not generated yet, or fall into more runs than there is room
            for.
    """
    if any(isinstance(leaf, Ids | Marked) for one in selections for leaf in one.where.leaves()):
        found = _found(selections, row)
    else:
        found = _alike(tuple(selections), row.prompt_len, row.length)
    for selection, runs in zip(selections, found, strict=True):
        if len(runs) > max_runs:
            raise PlanError(
                f"{selection} selects {len(runs)} separate runs of positions in prompt {row.content.index}; this "
                f"engine was started with max_runs={max_runs}. Start it with max_runs={len(runs)}."
            )
    return found


@lru_cache(maxsize=KEPT_RUNS)
def _alike(selections: tuple[Selection, ...], prompt_len: int, length: int) -> tuple[Runs, ...]:
    """A set's positions in rows of one length, cached; for sets that depend on neither tokens nor texts."""
    rows = RowPositions.of_rows([length], [prompt_len])
    return tuple(runs_of(selection.resolve(rows)[0].numpy()) for selection in selections)


def _found(selections: Sequence[Selection], row: Row) -> tuple[Runs, ...]:
    marks = marks_for([selection.where for selection in selections], [row.content])
    found = []
    for selection in selections:
        masks = [_mask(selection, row, marks, filler) for filler in _fillers(selection.where, row)]
        if any(not np.array_equal(mask, masks[0]) for mask in masks[1:]):
            raise PlanError(
                f"{selection} depends on tokens that are still to be generated, which this engine cannot look at "
                "before they run; restrict it to the prompt, e.g. `... & sl.where.prompt()`."
            )
        found.append(runs_of(masks[0]))
    return tuple(found)


def _mask(selection: Selection, row: Row, marks: Any, filler: int) -> np.ndarray:
    ids = [*row.token_ids, *[filler] * (row.length - len(row.token_ids))][: row.length]
    return selection.resolve(RowPositions.of_tokens([ids], [row.prompt_len], marks))[0].numpy()


def _fillers(where: Where, row: Row) -> list[int]:
    """Tokens to try in the place of generated ones: each that the set looks for, and one that it does not."""
    sought = {i for leaf in where.leaves() if isinstance(leaf, Ids) for i in leaf.token_ids}
    if row.length <= len(row.token_ids):
        return [0]
    return [*sorted(sought), max(sought, default=-1) + 1]


def positions_of(where: Where, row: Row) -> Runs:
    """The positions of one set in a row whose tokens are all known, in any number of runs."""
    marks = marks_for([where], [row.content])
    return runs_of(_mask(Selection(where), row, marks, 0))
