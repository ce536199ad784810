"""What a plan would edit: a table of tokens by hook points, made without running the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from steerlab.core._spelling import token_text
from steerlab.core._text import PromptLike, TargetLike, encode_pair, encode_prompt, is_prompt, is_target
from steerlab.core.errors import PlanError, PromptError
from steerlab.display import Fold, Piece, Remarks, Shown, Table, TokenRow, TokenView, count, sequential, visible
from steerlab.steering.plan import Plan
from steerlab.steering.positions._prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions._rows import RowPositions

_ANY_ID = 1 << 62
_WIDEST = 24


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The edits that a plan makes to one row.

    `print` shows it as a table; a cell names the edits that reach the token, by their number in the plan, and `?` after
    a number says that a condition decides. The row's last token drives nothing and is never edited.

    Attributes:
        plan: the plan.
        token_ids: the row's tokens.
        tokens: what each spells; the id itself if no tokenizer was at hand.
        prompt_len: how many of them are the prompt.
        cells: per hook point, per token, the numbers of the edits (from 1, in the plan's order) that reach it.
    """

    plan: Plan
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    prompt_len: int
    cells: dict[str, tuple[tuple[int, ...], ...]]

    @property
    def edited(self) -> int:
        """Edits over all tokens and hook points, conditions taken as passed: what a receipt will expect."""
        return sum(len(cell) for column in self.cells.values() for cell in column)

    def to_frame(self) -> pd.DataFrame:
        """A row per token: `position`, `token_id`, `token`, `part` (prompt, generated), and a column per hook point."""
        return pd.DataFrame(
            {
                "position": range(len(self.tokens)),
                "token_id": self.token_ids,
                "token": self.tokens,
                "part": ["prompt" if t < self.prompt_len else "generated" for t in range(len(self.tokens))],
            }
            | {name: [self._text(cell) for cell in column] for name, column in self.cells.items()}
        )

    def _text(self, cell: Sequence[int]) -> str:
        return "+".join(f"{k}{'?' if self.plan.edits[k - 1].when is not None else ''}" for k in cell)

    def __str__(self) -> str:
        frame = self.to_frame()
        frame["token"] = [_shown(token) for token in self.tokens]
        head = ["position", "token", "part", *self.cells]
        rows = [head, *([str(value) for value in row] for row in frame[head].itertuples(index=False))]
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        legend = [f"{k}: {edit}" for k, edit in enumerate(self.plan, start=1)] or ["(no edits)"]
        return "\n".join([*table, "", *legend])

    def _finding(self) -> str:
        reached = sum(any(column[t] for column in self.cells.values()) for t in range(len(self.tokens)))
        return f"{reached} of {count(len(self.tokens), 'token')} edited, {count(self.edited, 'edit')} in all"

    def _pieces(self) -> Sequence[Piece]:
        columns = ["position", "token", "part", *self.cells]
        frame = self.to_frame().assign(token=[_shown(token) for token in self.tokens])[columns]
        legend = Remarks([f"{k}: {edit}" for k, edit in enumerate(self.plan, start=1)])
        return [
            self.tokens_view(),
            legend,
            Fold("token by token", [Table.of_frame(frame, limit=400, more=".to_frame()")]),
        ]

    def tokens_view(self) -> TokenView:
        """The row's tokens, coloured by how many edits reach them."""
        numbers = [float(sum(len(column[t]) for column in self.cells.values())) for t in range(len(self.tokens))]
        row = TokenRow(self.tokens, tuple(numbers))
        return TokenView((row,), "edits that reach each token", "edits", sequential(numbers, low=0.0))


def explain(
    plan: Plan, prompt: PromptLike, engine: Any = None, *, completion: TargetLike | None = None, chat: bool = False
) -> Explanation:
    """Which tokens of a prompt, and of a completion if given, a plan edits at which hook points.

    Args:
        plan: the plan.
        prompt: text, chat messages or token ids.
        engine: an engine, or a tokenizer; only token ids can do without.
        completion: text or ids that follow the prompt and count as generated.
        chat: take a string as a user turn of a chat.

    Raises:
        PlanError: for text without an engine, or positions not found in the prompt.

    Examples:
        >>> import torch
        >>> from steerlab.steering.positions import where
        >>> from steerlab.steering.operators import add
        >>> from steerlab.steering.vectors import SteeringVector
        >>> v = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
        >>> print(explain(Plan(add(v, coef=1.0, where=where.index(1))), [5, 6, 7]))
        position  token  part    blocks.1.hook_resid_post
        0         5      prompt
        1         6      prompt  1
        2         7      prompt
        <BLANKLINE>
        1: add(coef=1) at blocks.1.hook_resid_post, index(1)
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"explain takes a Plan, got {type(plan).__name__}; wrap edits in Plan().")
    if not is_prompt(prompt):
        raise PromptError(f"explain takes one prompt: text, chat messages or token ids; got {prompt!r:.80}.")
    tokenizer = getattr(engine, "tokenizer", engine)
    if tokenizer is None and not (_are_ids(prompt) and (completion is None or _are_ids(completion))):
        raise PlanError("explain needs the engine (or tokenizer) to read text: sl.explain(plan, prompt, engine).")
    encoded = encode_prompt(tokenizer, prompt, chat=chat, d_vocab=_ANY_ID)
    context, following = encoded.token_ids, ()
    if completion is not None:
        pair = encode_pair(tokenizer, encoded, completion, d_vocab=_ANY_ID)
        context, following = pair.context_ids, pair.target_ids
    token_ids = (*context, *following)
    ready = plan.spelled(tokenizer)
    marks = marks_for(ready.sets, [PromptContent(0, 1, encoded.token_ids, encoded.text, tokenizer)])
    rows = RowPositions.of_tokens([token_ids], [len(context)], marks)
    reached = [edit.selects(rows)[0].tolist() for edit in ready]
    last = len(token_ids) - 1 if following else len(token_ids)
    return Explanation(plan, token_ids, _spelled(tokenizer, token_ids), len(context), _cells(plan, reached, last))


def _are_ids(item: PromptLike | TargetLike) -> bool:
    return is_target(item) and not isinstance(item, str)


def _cells(plan: Plan, reached: list[list[bool]], last: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    n_tokens = len(reached[0]) if reached else 0
    return {
        point.name: tuple(
            tuple(k + 1 for k, edit in enumerate(plan) if edit.hook_point == point and reached[k][t] and t < last)
            for t in range(n_tokens)
        )
        for point in sorted(plan.hook_points)
    }


def _spelled(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, ...]:
    if tokenizer is None:
        return tuple(map(str, token_ids))
    return tuple(token_text(tokenizer, token) for token in token_ids)


def _shown(token: str) -> str:
    """A token on one line, its whitespace visible."""
    text = visible(token)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
