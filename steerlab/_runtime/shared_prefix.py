"""A beginning that all contexts of a call share, such as a few-shot header: whether it may run once for all of them.

The prefix runs as one row; each context then continues it by tokens of its own, padded between the two. That gap is
harmless where attention looks at positions only, and a window that counts cache slots would fall short by it, so only
families without such windows share. A plan must edit the prefix alike for every context: then its counts are inherited
as they are, and receipts stay exact.
"""

from collections.abc import Collection, Sequence
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from steerlab._runtime.families import CHECKED_FAMILIES
from steerlab.core._text import common_prefix_length
from steerlab.steering.operators._edit import Edit
from steerlab.steering.plan import Plan
from steerlab.steering.positions._by_tokens import by_tokens
from steerlab.steering.positions._prompt_lookup import looks_at_prompts
from steerlab.steering.positions._rows import RowPositions

LEAST_PREFIX = 64  # tokens; below, one more pass costs more than it saves


def shared_prefix(causal: Any, plan: Plan, contexts: Sequence[tuple[int, ...]], own: int = 1) -> int:
    """How many leading tokens may run once for all of these contexts; 0 if they must run each by itself.

    Args:
        causal: the causal language model.
        plan: the plan that runs on all of them.
        contexts: different contexts, as token ids.
        own: how many tokens every context keeps at least.
    """
    if len(contexts) < 2 or not _attends_by_position(causal.config.get_text_config()):
        return 0
    # what the first and the last in lexical order share, all share
    length = min(common_prefix_length(min(contexts), max(contexts)), min(map(len, contexts)) - own)
    return length if length >= LEAST_PREFIX and _edits_alike(plan, contexts, length) else 0


def edits_from_the_last_token(plan: Plan, lengths: Collection[int]) -> bool:
    """Whether a plan leaves all tokens of contexts before their last ones alone, whatever the tokens are.

    Args:
        plan: a plan without conditions.
        lengths: tokens of the contexts.
    """
    if looks_at_prompts(plan.sets) or by_tokens(plan.sets):
        return False
    rows = RowPositions.of_rows(list(lengths), list(lengths))  # they end together
    return not any(bool(edit.selects(rows)[:, :-1].any()) for edit in plan)


def _attends_by_position(config: Any) -> bool:
    """Whether a gap of padding inside a row changes nothing on this family."""
    return (
        config.model_type in CHECKED_FAMILIES
        and getattr(config, "sliding_window", None) is None
        and "sliding_attention" not in (getattr(config, "layer_types", None) or ())
    )


def _edits_alike(plan: Plan, contexts: Sequence[tuple[int, ...]], length: int) -> bool:
    if plan.conditions or looks_at_prompts(plan.sets) or any(edit.schedule is not None for edit in plan):
        return False
    reached = [_prefix_masks(list(plan), context, length) for context in contexts]
    return all(bool((a == b).all()) for masks in reached[1:] for a, b in zip(reached[0], masks, strict=True))


def _prefix_masks(edits: Sequence[Edit], context: Sequence[int], length: int) -> list[Bool[Tensor, "1 prefix"]]:
    rows = RowPositions.of_tokens([context], [len(context)])
    return [edit.selects(rows)[:, :length] for edit in edits]
