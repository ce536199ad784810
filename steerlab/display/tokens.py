"""Texts whose tokens are coloured by a number: a log-prob, its change, an entropy, a projection, or any other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steerlab.display.colors import Scale, diverging, sequential
from steerlab.display.html import Face, Fold, escaped, figure

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


@dataclass(frozen=True)
class TokenView:
    """Texts with coloured tokens; a notebook shows them, and `print` shows a table.

    Attributes:
        rows: the texts.
        label: what the numbers are, e.g. `Δ log p`.
        unit: their unit, e.g. `nats`; empty if they have none.
        scale: the colours.
    """

    rows: tuple[TokenRow, ...]
    label: str
    unit: str
    scale: Scale

    def __repr__(self) -> str:
        n_tokens = sum(len(row.tokens) for row in self.rows)
        return f"TokenView({self.label}, {len(self.rows)} texts, {n_tokens} tokens)"

    def __str__(self) -> str:
        lines = [f"{self.label}{self._unit}"]
        for row in self.rows:
            lines += [row.name] if row.name else []
            width = max((len(_visible(token)) for token in row.tokens), default=0)
            pairs = zip(row.tokens, row.values, strict=True)
            lines += [f"  {_visible(token):<{width}}  {figure(value)}" for token, value in pairs]
        return "\n".join(lines)

    def html(self) -> str:
        """The texts without style, as a piece of a face."""
        return "".join(self._row(row) for row in self.rows)

    def _repr_html_(self) -> str:
        n_tokens = sum(len(row.tokens) for row in self.rows)
        body = [Fold(f"{n_tokens} tokens", [self])] if n_tokens > LONG else [self]
        return Face(f"{self.label}{self._unit}", [_Legend(self.scale), *body]).html()

    @property
    def _unit(self) -> str:
        return f" ({self.unit})" if self.unit else ""

    def _row(self, row: TokenRow) -> str:
        name = f"<b>{escaped(row.name)}</b> " if row.name else ""
        spans = "".join(self._token(token, value) for token, value in zip(row.tokens, row.values, strict=True))
        return f'<p class="sl-tokens">{name}{spans}</p>'

    def _token(self, token: str, value: float) -> str:
        text = escaped(token.replace("\n", "⏎\n")) or "∅"
        if math.isnan(value):
            return f"<i>{text}</i>"
        unit = f" {self.unit}" if self.unit else ""
        return f'<i style="{self.scale.css(value)}" title="{escaped(f"{figure(value, 4)}{unit}")}">{text}</i>'


@dataclass(frozen=True)
class _Legend:
    """The ends of a scale and the colours between them."""

    scale: Scale

    def html(self) -> str:
        low, high = self.scale.low, self.scale.high
        stops = ",".join(_background(self.scale, low + (high - low) * k / 8) for k in range(9))
        bar = f'<span class="sl-bar" style="background:linear-gradient(90deg,{stops})"></span>'
        return f"<p>{escaped(figure(low))} {bar} {escaped(figure(high))}</p>"


def tokens(
    texts: Sequence[Any],
    values: Sequence[Any],
    *,
    label: str = "value",
    unit: str = "",
    names: Sequence[str] | None = None,
    scale: Literal["diverging", "sequential"] | Scale = "diverging",
) -> TokenView:
    """Shows tokens coloured by numbers of one's own.

    Args:
        texts: the tokens of a text, or of several texts, a list each.
        values: a number per token, likewise; NaN leaves a token without colour.
        label: what the numbers are.
        unit: their unit.
        names: a name per text.
        scale: `diverging` around 0, `sequential` from the smallest to the largest, or a scale.

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
    return TokenView(tuple(made), label, unit, _scale(scale, [value for row in made for value in row.values]))


def _scale(scale: str | Scale, values: list[float]) -> Scale:
    if isinstance(scale, Scale):
        return scale
    kinds: dict[str, Callable[[list[float]], Scale]] = {"diverging": diverging, "sequential": sequential}
    if scale not in kinds:
        raise ValueError(f"scale is 'diverging', 'sequential' or a Scale, got {scale!r}.")
    return kinds[scale](values)


def _background(scale: Scale, value: float) -> str:
    return scale.css(value).split(";")[0].removeprefix("background:")


def _visible(token: str) -> str:
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
