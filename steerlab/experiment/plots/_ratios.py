"""Axes of perplexity ratios: logarithmic, with round ticks such as ×1.1 and ×2 as far as their labels find room."""

import math
from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import FuncFormatter, Locator, NullLocator
from typing_extensions import override

# Round ratios within a decade, the roundest first; all but the last rows in every decade.
_EVERYWHERE: Final = ((1.0,), (2.0, 5.0), (1.5, 3.0))
_NEAR_ONE: Final = ((0.8, 1.2, 1.35, 1.75), (0.9, 1.1), (0.95, 1.05), (0.98, 1.02), (0.99, 1.01))
_DECADES: Final = range(-3, 13)
_MOST: Final = 6
# Of a tick's label, in multiples of its font size: width of a character, gap beside the label, height with its gap.
_CHARACTER, _GAP, _HEIGHT = 0.65, 1.0, 2.0


class RatioLocator(Locator):
    """Ticks at round ratios: the roundest first, and others wherever neighbours leave room for their labels."""

    @override
    def __call__(self) -> Sequence[float]:
        low, high = self.axis.get_view_interval()  # pyright: ignore[reportOptionalMemberAccess]  set with the axis
        return self.tick_values(low, high)

    @override
    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        low, high = sorted((vmin, vmax))
        if not 0 < low < high < math.inf:
            return []
        span, length = math.log(high / low), self._length()
        found: list[float] = []
        for tick in _by_roundness():
            apart = [abs(math.log(tick / other)) / span for other in found]
            needed = [max(1 / _MOST, (self._extent(tick) + self._extent(other)) / 2 / length) for other in found]
            if low <= tick <= high and all(map(float.__ge__, apart, needed)):
                found.append(tick)
        return sorted(found)

    def _length(self) -> float:
        """Of the axis, in font sizes of its labels."""
        axis: Any = self.axis
        size, dpi = axis.get_major_ticks(1)[0].label1.get_fontsize(), axis.axes.figure.dpi
        box = axis.axes.get_window_extent()
        pixels = box.width if isinstance(self.axis, XAxis) else box.height
        return max(pixels * 72 / dpi / size, 1.0)

    def _extent(self, tick: float) -> float:
        """Of a tick's label along the axis, in font sizes."""
        return _CHARACTER * len(_label(tick)) + _GAP if isinstance(self.axis, XAxis) else _HEIGHT


def ratio_axis(axis: XAxis | YAxis) -> None:
    """Makes an axis one of perplexity ratios."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(RatioLocator())
    axis.set_major_formatter(FuncFormatter(lambda tick, _: _label(tick)))
    axis.set_minor_locator(NullLocator())


def _label(tick: float) -> str:
    return f"×{tick:g}"


def _by_roundness() -> list[float]:
    decades = sorted((10.0**k for k in _DECADES), key=lambda decade: abs(math.log(decade)))
    everywhere = [step * decade for row in _EVERYWHERE for decade in decades for step in row]
    return [*everywhere, *(step for row in _NEAR_ONE for step in row)]
