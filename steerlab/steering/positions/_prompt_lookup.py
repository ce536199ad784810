"""Finding `span` and `mask` positions in the prompts of a call, before it runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from steerlab.core._text import common_prefix_length, token_offsets
from steerlab.core.errors import PlanError
from steerlab.steering.positions._rows import Marks
from steerlab.steering.positions._sets import Marked, Mask, Span, Where


@dataclass(frozen=True)
class PromptContent:
    """The prompt a row came from.

    Attributes:
        index: which prompt of the call.
        n_prompts: how many prompts the call has.
        token_ids: the prompt's tokens.
        text: the text they came from; None if the caller gave ids.
        tokenizer: the model's own tokenizer; None if there is no text to search.
        limit: the row's tokens are the prompt's up to here only, because the next merged with a target's; None if they
            all are.
    """

    index: int
    n_prompts: int
    token_ids: tuple[int, ...]
    text: str | None = None
    tokenizer: Any = field(default=None, repr=False)
    limit: int | None = None

    def before(self, context_ids: Sequence[int]) -> "PromptContent":
        """The same for a row that starts with a context; the two may differ where tokens merge with a target's."""
        return replace(self, limit=common_prefix_length(context_ids, self.token_ids))

    def find(self, where: Marked) -> list[int]:
        """The absolute positions that a set holds here.

        Raises:
            PlanError: if the text is not there, or the mask was made for another number of prompts.
        """
        if isinstance(where, Span):
            return self._spelling(where)
        assert isinstance(where, Mask)
        if len(where.rows) not in (1, self.n_prompts):
            raise PlanError(
                f"The plan's mask has {len(where.rows)} rows and the call {self.n_prompts} prompts; "
                "give one row per prompt, or a single row for all."
            )
        return list(where.rows[self.index if len(where.rows) > 1 else 0])

    def _spelling(self, span: Span) -> list[int]:
        if self.tokenizer is None:
            raise PlanError(f"{span} needs the prompt's text, and here there is none; use index or mask positions.")
        text, offsets = token_offsets(self.tokenizer, self.token_ids, self.text)
        places = _occurrences(text, span.text)
        if span.occurrence is not None:
            inside = -len(places) <= span.occurrence < len(places)
            places = [places[span.occurrence]] if inside else []
        if not places and span.missing == "error":
            raise PlanError(
                f"Prompt {self.index} does not hold {span}: {text!r:.120}. "
                "Check the text, or write span(..., missing='skip') to leave such prompts alone."
            )
        ends = [(place, place + len(span.text)) for place in places]
        found = [
            position
            for position, (start, stop) in enumerate(offsets)
            if any(start < last and first < stop for first, last in ends)
        ]
        if self.limit is not None and any(position >= self.limit for position in found):
            raise PlanError(
                f"{span} ends at the end of prompt {self.index}, where the tokenizer merges prompt and target; "
                "score with boundary='separate'."
            )
        return found


def marks_for(sets: Iterable[Where], contents: Sequence[PromptContent] | None, device: Any = "cpu") -> Marks | None:
    """The positions that `span` and `mask` sets hold in each row's prompt; None if there are no such sets.

    Args:
        sets: sets that will be resolved.
        contents: the prompt of each row.
        device: where the tables go.

    Raises:
        PlanError: if prompts are needed and not known, or something is not found in one.
    """
    wanted = {leaf for where in sets for leaf in where.leaves() if isinstance(leaf, Marked)}
    if not wanted:
        return None
    if contents is None:
        raise PlanError(f"{next(iter(wanted))} needs the prompts of the call, and here they are not known.")
    return Marks({where: _table([content.find(where) for content in contents], device) for where in wanted})


def looks_at_prompts(sets: Iterable[Where]) -> bool:
    """Whether rows with the same tokens may differ in their positions."""
    return any(isinstance(leaf, Marked) for where in sets for leaf in where.leaves())


def _table(found: Sequence[Sequence[int]], device: Any) -> torch.Tensor:
    table = torch.zeros(len(found), 1 + max((p for row in found for p in row), default=0), dtype=torch.bool)
    for row, positions in enumerate(found):
        table[row, list(positions)] = True
    return table.to(device)


def _occurrences(text: str, wanted: str) -> list[int]:
    """Start of every occurrence, overlapping ones included."""
    found, start = [], text.find(wanted)
    while start >= 0:
        found.append(start)
        start = text.find(wanted, start + 1)
    return found
