"""How rows can grow on a model: which of its shortcuts give what running every row whole gives.

Families differ in whether they respect an attention mask, keep a cache, continue it by more than one token, or let
rows of it be chosen. What a model does is found by trying: two short rows, once with the shortcut and once whole.
Families that are compared by tests are not tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from steerlab._runtime.families import CHECKED_FAMILIES
from steerlab._runtime.hooks import alone
from steerlab._runtime.model_state import remembered
from steerlab._runtime.rows import Rows, left_padded
from steerlab._runtime.whole_rows import WholeRows
from steerlab.steering._run import PlanRun
from steerlab.steering.plan import Plan

AnyRows = Rows | WholeRows
_SHORT, _LONG, _NEXT = (1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11), ((12, 13), (14, 15))
_TOLERANCE = {torch.float64: 2e-3, torch.float32: 2e-3}
_COARSE = 3e-2


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
    with alone(model):
        return remembered(model, "growth", lambda: _tried(model))


@torch.no_grad()
def _tried(model: Any) -> Growth:
    prompts, following = left_padded([_SHORT, _LONG]), torch.tensor(_NEXT)
    everything = torch.ones_like(following, dtype=torch.bool)
    whole = WholeRows(model, _no_plan(), _lens())
    first = whole.extend(*prompts, keep=1)
    after = whole.extend(following, everything)

    def steps() -> list[tuple[Tensor, Tensor]]:
        rows = Rows(model, _no_plan(), _lens())
        found = [(rows.extend(*prompts, keep=1), first)]
        return found + [(rows.step(following[:, k]), after[:, k : k + 1]) for k in (0, 1)]

    def narrows() -> list[tuple[Tensor, Tensor]]:
        rows = Rows(model, _no_plan(), _lens())
        rows.extend(*prompts, keep=1)
        rows.narrow(torch.tensor([0]))
        return [(rows.step(following[:1, 0]), after[:1, :1])]

    def blocks() -> list[tuple[Tensor, Tensor]]:
        rows = Rows(model, _no_plan(), _lens())
        rows.extend(*prompts, keep=1)
        order, valid = [1, 0, 1], everything[[0, 0, 0]].clone()
        valid[2, 1] = False
        found = rows.selected(order).extend(following[order], valid)
        return [(found[:2], after[order[:2]]), (found[2:, :1], after[1:, :1])]

    return Growth(_agree(steps), _agree(blocks), _agree(narrows))


def _no_plan() -> PlanRun:
    return PlanRun(Plan(), 2)


def _lens() -> list[int]:
    return [len(_SHORT), len(_LONG)]


def _agree(attempt: Callable[[], list[tuple[Tensor, Tensor]]]) -> bool:
    """Whether a shortcut gives the logits wanted, up to rounding; one at which the model fails does not."""
    try:
        found = attempt()
    except Exception:  # foreign code, which may fail in any way; then rows run whole, and what is wrong with that shows
        return False
    return all(_close(ours, wanted) for ours, wanted in found)


def _close(found: Tensor, wanted: Tensor) -> bool:
    difference = (found.float() - wanted.float()).abs().amax()
    spread = (wanted.float().amax(dim=-1) - wanted.float().amin(dim=-1)).amin()
    return not bool(difference > _TOLERANCE.get(wanted.dtype, _COARSE) * spread)
