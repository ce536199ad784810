"""Texts whose tokens are coloured by a number: a log-prob, its change, an entropy, a projection, or any other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steerlab.display.colors import Legend, Scale, diverging, sequential
from steerlab.display.grid import visible
from steerlab.display.html import Fold, Piece, Shown, count, escaped, figure

LONG = 400


@dataclass(frozen=True)
class TokenRow:
    """One text.

    Attributes:
        tokens: what each token spells.
        values: a number per token; NaN for a token without one.
        name: what stands before the text.
    """

    tokens: tuple[str, ...]
    values: tuple[float, ...]
    name: str = ""


@dataclass(frozen=True, repr=False)
class TokenView(Shown):
    """Texts with coloured tokens; a notebook shows them, and `print` shows a table.

    Attributes:
        rows: the texts.
        label: what the numbers are, e.g. `Δ log p`.
        unit: their unit, e.g. `nats`; empty if they have none.
        scale: the colours.
        aligned: whether the k-th tokens of all texts stand below each other; lines break between tokens.
    """

    rows: tuple[TokenRow, ...]
    label: str
    unit: str
    scale: Scale
    aligned: bool = False

    def __str__(self) -> str:
        lines = [f"{self.label}{f' ({self.unit})' if self.unit else ''}"]
        for row in self.rows:
            lines += [row.name] if row.name else []
            width = max((len(visible(token)) for token in row.tokens), default=0)
            pairs = zip(row.tokens, row.values, strict=True)
            lines += [f"  {visible(token):<{width}}  {figure(value)}" for token, value in pairs]
        return "\n".join(lines)

    def html(self) -> str:
        """The texts without style, as a piece of a face."""
        if self.aligned:
            named = any(row.name for row in self.rows)
            names = f"<span>{''.join(f'<b>{escaped(row.name)}</b>' for row in self.rows)}</span>" if named else ""
            columns = range(max((len(row.tokens) for row in self.rows), default=0))
            return f'<p class="sl-tokens sl-aligned">{names}{"".join(map(self._column, columns))}</p>'
        if not any(row.name for row in self.rows):
            return "".join(f'<p class="sl-tokens">{self._spans(row)}</p>' for row in self.rows)
        body = "".join(
            f'<tr><th scope="row">{escaped(row.name)}</th><td class="sl-tokens">{self._spans(row)}</td></tr>'
            for row in self.rows
        )
        return f"<table><tbody>{body}</tbody></table>"

    @property
    def n_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(row.tokens) for row in self.rows)

    def _finding(self) -> str:
        return f"{self.label}, {count(len(self.rows), 'text')}, {count(self.n_tokens, 'token')}"

    def _pieces(self) -> Sequence[Piece]:
        body = [Fold(count(self.n_tokens, "token"), [self])] if self.n_tokens > LONG else [self]
        return [Legend(self.scale, self.unit), *body]

    def _spans(self, row: TokenRow) -> str:
        return "".join(self._token(token, value) for token, value in zip(row.tokens, row.values, strict=True))

    def _column(self, k: int) -> str:
        """The k-th tokens of all texts, one below the other."""
        cells = [
            (visible(row.tokens[k]), row.values[k]) if k < len(row.tokens) else (" ", math.nan) for row in self.rows
        ]
        return f"<span>{''.join(self._token(*cell) for cell in cells)}</span>"

    def _token(self, token: str, value: float) -> str:
        text = escaped(token.replace("\n", "⏎\n")) or "∅"
        if math.isnan(value):
            return f"<i>{text}</i>"
        told = escaped(f"{figure(value, 4)} {self.unit}".strip())
        return f'<i style="{self.scale.css(value)}" title="{told}">{text}</i>'


def tokens(
    texts: Sequence[Any],
    values: Sequence[Any],
    *,
    label: str = "value",
    unit: str = "",
    names: Sequence[str] | None = None,
    scale: Literal["diverging", "sequential"] | Scale = "diverging",
    aligned: bool = False,
) -> TokenView:
    """Shows tokens coloured by numbers of one's own.

    Args:
        texts: the tokens of a text, or of several texts, a list each.
        values: a number per token, likewise; NaN leaves a token without colour.
        label: what the numbers are.
        unit: their unit.
        names: a name per text.
        scale: `diverging` around 0, `sequential` from the smallest to the largest, or a scale.
        aligned: put the k-th tokens of all texts below each other; lines break between tokens.

    Raises:
        ValueError: if tokens, values and names do not match.

    Examples:
        >>> print(tokens(["The", " cat"], [0.5, -1.25], label="projection"))
        projection
          The   0.500
          ·cat  −1.25
    """
    single = all(isinstance(token, str) for token in texts)
    rows, numbers = ([texts], [values]) if single else (texts, values)
    names = [""] * len(rows) if names is None else names
    if not len(rows) == len(numbers) == len(names):
        raise ValueError(f"Got {len(rows)} texts, {len(numbers)} lists of values and {len(names)} names.")
    made = []
    for row, own, name in zip(rows, numbers, names, strict=True):
        if len(row) != len(own):
            raise ValueError(f"A text has {len(row)} tokens and {len(own)} values; each token has one.")
        made.append(TokenRow(tuple(row), tuple(map(float, own)), name))
    colors = _scale(scale, [value for row in made for value in row.values])
    return TokenView(tuple(made), label, unit, colors, aligned)


def _scale(scale: str | Scale, values: list[float]) -> Scale:
    if isinstance(scale, Scale):
        return scale
    kinds: dict[str, Callable[[list[float]], Scale]] = {"diverging": diverging, "sequential": sequential}
    if scale not in kinds:
        raise ValueError(f"scale is 'diverging', 'sequential' or a Scale, got {scale!r}.")
    return kinds[scale](values)
