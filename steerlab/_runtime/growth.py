"""How rows can grow on a model: which of its shortcuts give what running every row whole gives.

Families differ in whether they respect an attention mask, keep a cache, continue it by more than one token, or let
rows of it be chosen. What a model does is found by trying: two short rows, once with the shortcut and once whole.
Families that are compared by tests are not tried. A trial for which memory does not suffice says nothing: its error is
the call's, and the next call tries again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from steerlab._runtime.families import CHECKED_FAMILIES
from steerlab._runtime.hooks import alone
from steerlab._runtime.rows import Rows, left_padded
from steerlab._runtime.self_comparison import found_out, is_out_of_memory, ordinary_tokens, rounding_of, undisturbed
from steerlab._runtime.whole_rows import WholeRows
from steerlab.measures._rounding import Rounding
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan

AnyRows = Rows | WholeRows
Pairs = list[tuple[Tensor, Tensor]]
_LENS, _AFTER = (3, 8), 2
"""Tokens of the two prompts, and how many follow each."""


@dataclass(frozen=True)
class Growth:
    """What is right on a model.

    Attributes:
        steps: left-padded prompts, and one token at a time after them, from the cache.
        blocks: several tokens at a time after a cache, some of them padding, for chosen rows of it.
        narrows: dropping rows of a cache.
    """

    steps: bool
    blocks: bool
    narrows: bool


def fresh_rows(
    model: Any, run: PlanRun, prompt_lens: Sequence[int], by: Literal["step", "block"], *, use_cache: bool = True
) -> AnyRows:
    """Rows that have not begun: with a cache where that is right on this model.

    The shortcuts of a model are tried out when its first rows are made. Make rows before hooks are attached: the
    trial's passes would be read and edited like those of the call.

    Args:
        model: the causal language model to call, of a backend.
        run: the plan at work on these rows.
        prompt_lens: prompt length of each row.
        by: how they will grow after the prompt: `step` token by token, or `block`.
        use_cache: False runs every row whole in every pass.
    """
    growth = growth_of(model) if use_cache else None
    if growth is None or not (growth.steps if by == "step" else growth.blocks):
        return WholeRows(model, run, prompt_lens)
    rows = Rows(model, run, prompt_lens)
    rows.can_narrow = rows.can_narrow and growth.narrows
    return rows


def growth_of(model: Any) -> Growth:
    """What is right on a model, tried once."""
    if model.config.get_text_config().model_type in CHECKED_FAMILIES:
        return Growth(True, True, True)
    with alone(model), undisturbed(model):
        return found_out(model, "growth", lambda: _tried(model))


def _tried(model: Any) -> Growth:
    rounding, tokens = rounding_of(model), iter(ordinary_tokens(model, sum(_LENS) + _AFTER * len(_LENS)))
    prompts = left_padded([list(islice(tokens, length)) for length in _LENS])
    following = torch.tensor([list(islice(tokens, _AFTER)) for _ in _LENS])
    everything = torch.ones_like(following, dtype=torch.bool)
    whole = WholeRows(model, _no_plan(), _LENS)
    first = whole.extend(*prompts, keep=1)
    after = whole.extend(following, everything)

    def steps() -> Pairs:
        rows = Rows(model, _no_plan(), _LENS)
        found = [rows.extend(*prompts, keep=1), *(rows.step(tokens) for tokens in following.T)]
        return [(torch.cat(found, dim=1), torch.cat([first, after], dim=1))]

    def narrows() -> Pairs:
        rows = Rows(model, _no_plan(), _LENS)
        rows.extend(*prompts, keep=1)
        rows.narrow(torch.tensor([0]))
        return [(rows.step(following[:1, 0]), after[:1, :1])]

    def blocks() -> Pairs:
        rows = Rows(model, _no_plan(), _LENS)
        rows.extend(*prompts, keep=1)
        order, valid = [1, 0, 1], everything[[0, 0, 0]].clone()
        valid[2, 1] = False
        found = rows.selected(order).extend(following[order], valid)
        return [(found[:2], after[order[:2]]), (found[2:, :1], after[1:, :1])]

    return Growth(_agree(steps, rounding), _agree(blocks, rounding), _agree(narrows, rounding))


def _no_plan() -> PlanRun:
    return PlanRun(Plan(), len(_LENS))


def _agree(attempt: Callable[[], Pairs], rounding: Rounding) -> bool:
    """Whether a shortcut gives the logits wanted, up to rounding; one at which the model fails does not."""
    try:
        found = attempt()
    except Exception as error:  # foreign code, which may fail in any way; rows then run whole, and what is wrong shows
        if is_out_of_memory(error):
            raise
        return False
    return all(rounding.explains(ours, wanted) for ours, wanted in found)
