"""Positions as runs: what a plan's sets hold in one request, found before it is submitted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steerlab.core.errors import PlanError
from steerlab.engines.vllm.specs import Runs, runs_of
from steerlab.steering.content import PromptContent, marks_for
from steerlab.steering.positions import RowPositions
from steerlab.steering.sets import Ids, Where


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


def resolve(wheres: Sequence[Where], row: Row, max_runs: int) -> tuple[Runs, ...]:
    """The positions of each set in a row.

    Raises:
        PlanError: if positions depend on tokens that are not generated yet, or fall into more runs than there is room
            for.
    """
    marks = marks_for(wheres, [row.content])
    found = []
    for where in wheres:
        masks = {_mask(where, row, marks, filler) for filler in _fillers(where, row)}
        if len(masks) > 1:
            raise PlanError(
                f"{where} depends on tokens that are still to be generated, which this engine cannot look at before "
                "they run; restrict it to the prompt, e.g. `... & sl.where.prompt()`."
            )
        runs = runs_of(masks.pop())
        if len(runs) > max_runs:
            raise PlanError(
                f"{where} selects {len(runs)} separate runs of positions in prompt {row.content.index}; this engine "
                f"was started with max_runs={max_runs}. Start it with max_runs={len(runs)}."
            )
        found.append(runs)
    return tuple(found)


def _mask(where: Where, row: Row, marks: Any, filler: int) -> tuple[bool, ...]:
    ids = [*row.token_ids, *[filler] * (row.length - len(row.token_ids))][: row.length]
    return tuple(where.resolve(RowPositions.of_tokens([ids], [row.prompt_len], marks))[0].tolist())


def _fillers(where: Where, row: Row) -> list[int]:
    """Tokens to try in the place of generated ones: each that the set looks for, and one that it does not."""
    sought = {i for leaf in where.leaves() if isinstance(leaf, Ids) for i in leaf.token_ids}
    if row.length <= len(row.token_ids):
        return [0]
    return [*sorted(sought), max(sought, default=-1) + 1]


def positions_of(where: Where, row: Row) -> Runs:
    """The positions of one set in a row whose tokens are all known, in any number of runs."""
    marks = marks_for([where], [row.content])
    return runs_of(_mask(where, row, marks, 0))


def no_content(token_ids: Sequence[int]) -> PromptContent:
    """A prompt of which only the tokens are known."""
    return PromptContent(0, 1, tuple(token_ids))
