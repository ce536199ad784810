"""Positions as runs: what a plan's sets hold in one request, found before it is submitted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from steerlab.core.errors import PlanError
from steerlab.engines.vllm._wire.config import MOST_SEQUENCES, MOST_TOKEN_RULES, MOST_TOKENS
from steerlab.engines.vllm._wire.rule_tables import fits
from steerlab.engines.vllm._wire.runs import Runs, RunsByTokens, depends_on_tokens, runs_by_tokens, runs_of
from steerlab.steering.operators._edit import chosen
from steerlab.steering.positions._by_tokens import ByTokens, by_tokens
from steerlab.steering.positions._prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions._rows import Marks, RowPositions
from steerlab.steering.positions._sets import Marked, Where
from steerlab.steering.positions.schedule import Schedule

MOST_COMPARED = 8
"""Sets that look at tokens in one selection, up to which it is found out whether generated ones matter."""

MOST_IN_INT64 = 5
"""Answers whose combinations fit the bits of an int64."""

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


def resolve(
    selections: Sequence[Selection], row: Row, max_runs: int, followed: Sequence[ByTokens] = ()
) -> tuple[Runs | RunsByTokens, ...]:
    """The positions of each selection in a row.

    Args:
        selections: what is looked for.
        row: the row.
        max_runs: separate runs that there is room for.
        followed: sets that the workers follow token by token, in the order of their rules; only these may decide at
            generated positions.

    Raises:
        PlanError: if positions depend on tokens that are not generated yet and that nobody follows, or fall into more
            runs than there is room for.
    """
    if not any(isinstance(leaf, ByTokens | Marked) for one in selections for leaf in one.where.leaves()):
        found: Sequence[Runs | RunsByTokens] = _alike(tuple(selections), row.prompt_len, row.length)
    else:
        marks = marks_for([selection.where for selection in selections], [row.content])
        found = [_found(selection, row, marks, max_runs, tuple(followed)) for selection in selections]
    for selection, runs in zip(selections, found, strict=True):
        if len(runs) > max_runs:
            raise PlanError(
                f"{selection} selects {len(runs)} separate runs of positions in prompt {row.content.index}; this "
                f"engine was started with max_runs={max_runs}. Start it with max_runs={len(runs)}."
            )
    return tuple(found)


@lru_cache(maxsize=KEPT_RUNS)
def _alike(selections: tuple[Selection, ...], prompt_len: int, length: int) -> tuple[Runs, ...]:
    """A set's positions in rows of one length, cached; for sets that depend on neither tokens nor texts."""
    rows = RowPositions.of_rows([length], [prompt_len])
    return tuple(runs_of(selection.resolve(rows)[0].numpy()) for selection in selections)


def _found(
    selection: Selection, row: Row, marks: Marks | None, max_runs: int, followed: tuple[ByTokens, ...]
) -> Runs | RunsByTokens:
    """Runs that are known before the row runs, or else runs in which the tokens decide.

    A target's tokens are known, but are treated as those of a generation are: then both have the same cache blocks.
    """
    leaves = by_tokens([selection.where])
    can_follow = bool(leaves) and all(leaf in followed for leaf in leaves)
    if leaves and _needs_generated(selection, leaves, row, marks):
        if can_follow:
            return _by_tokens(selection, followed, row.prompt_len, row.length, marks)
        if len(row.token_ids) < row.length:
            raise _not_followed(selection, leaves, followed)
    runs = runs_of(_known(selection, row, marks))
    if len(runs) > max_runs and can_follow:
        return _by_tokens(selection, followed, row.prompt_len, row.length, marks)
    return runs


def _needs_generated(selection: Selection, leaves: tuple[ByTokens, ...], row: Row, marks: Marks | None) -> bool:
    """Whether tokens decide at generated positions, be there any yet or not."""
    if len(leaves) > MOST_COMPARED:
        return True
    truths = _truths(selection, leaves, row.prompt_len, max(row.length, row.prompt_len + 1), marks)
    generated = truths[row.prompt_len :]
    return bool(((generated != 0) & (generated != (1 << (1 << len(leaves))) - 1)).any())


def _by_tokens(
    selection: Selection, followed: tuple[ByTokens, ...], prompt_len: int, length: int, marks: Marks | None
) -> RunsByTokens:
    return runs_by_tokens(_truths(selection, followed, prompt_len, length, marks))


def _truths(
    selection: Selection, leaves: tuple[ByTokens, ...], prompt_len: int, length: int, marks: Marks | None
) -> np.ndarray:
    """Per position in which combinations of the leaves' answers it is selected, as bits."""
    if marks is None:
        return _alike_truths(selection, leaves, prompt_len, length)
    return _combined(selection, leaves, prompt_len, length, marks)


@lru_cache(maxsize=KEPT_RUNS)
def _alike_truths(selection: Selection, leaves: tuple[ByTokens, ...], prompt_len: int, length: int) -> np.ndarray:
    """The same in rows of one length, cached; most requests of a call are alike."""
    return _combined(selection, leaves, prompt_len, length, None)


def _combined(
    selection: Selection, leaves: tuple[ByTokens, ...], prompt_len: int, length: int, marks: Marks | None
) -> np.ndarray:
    rows = replace(RowPositions.of_rows([length], [prompt_len]), marks=marks)
    truths = np.zeros(length, dtype=object if len(leaves) > MOST_IN_INT64 else np.int64)
    for index in range(1 << len(leaves)):
        answers = {leaf: torch.full((1, length), bool(index >> place & 1)) for place, leaf in enumerate(leaves)}
        truths[selection.resolve(replace(rows, followed=answers))[0].numpy()] |= 1 << index
    return truths


def _not_followed(selection: Selection, leaves: Sequence[ByTokens], followed: Sequence[ByTokens]) -> PlanError:
    """Why nobody follows a selection's tokens while they are generated, and what to do."""
    reason = next((leaf for leaf in leaves if not fits(leaf.rule)), None)
    if reason is not None:
        said = (
            f"{reason} names more than {MOST_SEQUENCES} alternatives, or one of more than {MOST_TOKENS} tokens, which "
            "is more than the workers have room for"
        )
    else:
        wanted = len({*leaves, *followed})
        said = (
            f"the plan needs room for {wanted} sets that look at tokens; start the engine with "
            f"max_token_rules={wanted} (at most {MOST_TOKEN_RULES})"
        )
    return PlanError(
        f"{selection} depends on tokens that are still to be generated: {said}, or restrict it to the prompt, e.g. "
        "`... & sl.where.prompt()`."
    )


def _known(selection: Selection, row: Row, marks: Marks | None) -> np.ndarray:
    """Which positions are selected where all tokens that matter are known."""
    ids = [*row.token_ids, *[0] * (row.length - len(row.token_ids))][: row.length]
    return selection.resolve(RowPositions.of_tokens([ids], [row.prompt_len], marks))[0].numpy()


def positions_of(where: Where, row: Row) -> Runs:
    """The positions of one set in a row whose tokens are all known, in any number of runs."""
    return runs_of(_known(Selection(where), row, marks_for([where], [row.content])))


def acting(
    groups: Sequence[Runs | RunsByTokens], followed: Sequence[ByTokens], token_ids: Sequence[int], prompt_len: int
) -> tuple[Runs, ...]:
    """Where each group acts in a row whose tokens are known by now.

    Positions beyond these tokens are left out of groups where tokens decide.
    """
    rows = RowPositions.of_tokens([list(token_ids)], [prompt_len])
    index = sum(leaf.resolve(rows)[0].numpy().astype(np.int64) << place for place, leaf in enumerate(followed))
    return tuple(_acting(group, np.asarray(index)) for group in groups)


def _acting(runs: Runs | RunsByTokens, index: np.ndarray) -> Runs:
    if not depends_on_tokens(runs):
        return runs  # pyright: ignore[reportReturnType]
    mask = np.zeros(len(index), dtype=bool)
    for first, last, truth in runs:  # pyright: ignore[reportAssignmentType]
        mask[first:last] = (truth >> index[first:last] & 1) > 0
    return runs_of(mask)
