"""From numbers to background colours, with text on them that can be read."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from steerlab.display.html import escaped, figure

_Rgb = tuple[float, float, float]

# Ends and middle of the scales, sRGB from 0 to 1. The middle of the diverging scale is white, so that 0 is no colour.
_NEGATIVE: _Rgb = (0.70, 0.34, 0.02)
_POSITIVE: _Rgb = (0.13, 0.40, 0.67)
_NOTHING: _Rgb = (1.0, 1.0, 1.0)
_MUCH: _Rgb = (0.27, 0.05, 0.42)


@dataclass(frozen=True)
class Scale:
    """A colour for every number.

    Attributes:
        low: the number at the scale's lower end; lower ones have its colour.
        high: the number at its upper end.
        is_diverging: whether two hues meet at 0.
    """

    low: float
    high: float
    is_diverging: bool

    def rgb(self, value: float) -> _Rgb | None:
        """The background of a value, sRGB from 0 to 1; None for NaN, which has no colour."""
        if math.isnan(value):
            return None
        place = min(max(value, self.low), self.high)
        if self.is_diverging:
            end, bound = (_NEGATIVE, self.low) if place < 0 else (_POSITIVE, self.high)
            share = place / bound if place else 0.0
        else:
            end, share = _MUCH, (place - self.low) / (self.high - self.low)
        return _mixed(end, share)

    def css(self, value: float) -> str:
        """Background and text colour of a value as CSS; empty for NaN."""
        found = self.rgb(value)
        return "" if found is None else f"background:{_hex(found)};color:{text_on(found)}"


def diverging(values: Iterable[float], limit: float | None = None) -> Scale:
    """A scale around 0: orange below, blue above, white at 0.

    Args:
        values: what will be coloured.
        limit: the number at both ends; by default the largest magnitude.

    Examples:
        >>> diverging([-1.0, 3.0])
        Scale(low=-3.0, high=3.0, is_diverging=True)
    """
    largest = float(np.abs(_finite(values)).max(initial=0.0)) if limit is None else abs(limit)
    largest = largest or 1.0
    return Scale(-largest, largest, True)


def sequential(values: Iterable[float], low: float | None = None, high: float | None = None) -> Scale:
    """A scale in one hue, white at its lower end.

    Args:
        values: what will be coloured.
        low: the number at the lower end; by default the smallest value.
        high: the number at the upper end; by default the largest value.

    Examples:
        >>> sequential([2.0, 0.5])
        Scale(low=0.5, high=2.0, is_diverging=False)
    """
    found = _finite(values)
    first = float(found.min(initial=math.inf)) if low is None else low
    last = float(found.max(initial=-math.inf)) if high is None else high
    if not first < last:
        first, last = (first - 0.5, first + 0.5) if math.isfinite(first) else (0.0, 1.0)
    return Scale(first, last, False)


def text_on(background: _Rgb) -> str:
    """Black or white, whichever has more contrast on a background."""
    luminance = _luminance(background)
    return "#000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#fff"


def contrast(first: _Rgb, second: _Rgb) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: _Rgb) -> float:
    """Relative luminance (WCAG 2.2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _mixed(end: _Rgb, share: float) -> _Rgb:
    """A colour between white and an end."""
    first, second, third = (a + (b - a) * share for a, b in zip(_NOTHING, end, strict=True))
    return first, second, third


def _hex(color: _Rgb) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in color)


def _finite(values: Iterable[float]) -> np.ndarray:
    found = np.asarray(list(values), dtype=np.float64)
    return found[np.isfinite(found)]


@dataclass(frozen=True)
class Legend:
    """The ends of a scale, their unit, and the colours between them, as a piece of a face.

    Attributes:
        scale: the scale.
        unit: of its numbers; empty if they have none.
    """

    scale: Scale
    unit: str = ""

    def html(self) -> str:
        """Its HTML."""
        low, high = self.scale.low, self.scale.high
        stops = ",".join(_hex(self.scale.rgb(low + (high - low) * k / 8) or _NOTHING) for k in range(9))
        bar = f'<span class="sl-bar" style="background:linear-gradient(90deg,{stops})"></span>'
        return f"<p>{escaped(figure(low))} {bar} {escaped(f'{figure(high)} {self.unit}'.strip())}</p>"
