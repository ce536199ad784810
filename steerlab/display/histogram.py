"""Two or more samples of a number as bars over one axis, drawn in plain SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steerlab.display.html import escaped, figure

_COLORS: Final = ("#4a90d9", "#cf7a1c", "#4d9a6a", "#a06cc0")
"""At least 3 : 1 on white and on black."""

_WIDTH, _HEIGHT, _LEFT, _TOP = 520, 150, 6, 18


@dataclass(frozen=True)
class Histogram:
    """How often numbers of several kinds fall where.

    Attributes:
        samples: the numbers by name; not finite ones are left out.
        label: what the numbers are, with their unit.
        n_bins: bars over the whole range.
    """

    samples: Mapping[str, Sequence[float]]
    label: str = ""
    n_bins: int = 30

    def html(self) -> str:
        """Its HTML; empty if there is no number."""
        found = {name: _finite(values) for name, values in self.samples.items()}
        every = np.concatenate([np.empty(0), *found.values()])
        if not len(every):
            return ""
        edges = np.histogram_bin_edges(every, bins=self.n_bins)
        counts = {name: np.histogram(values, bins=edges)[0] for name, values in found.items()}
        tallest = max(int(row.max()) for row in counts.values())
        bars = "".join(
            _bars(row, edges, tallest, color, name) for (name, row), color in zip(counts.items(), _COLORS, strict=False)
        )
        names = "".join(
            f'<tspan fill="{color}">■</tspan><tspan fill="currentColor"> {escaped(name)}  </tspan>'
            for name, color in zip(counts, _COLORS, strict=False)
        )
        told = escaped(f"Histogram of {self.label or 'values'}: {', '.join(map(_range, found, found.values()))}")
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 40}" width="{_WIDTH}" role="img" aria-label="{told}" '
            f'font-size="12">'
            f'<text x="{_LEFT}" y="12" xml:space="preserve">{names}</text>{bars}'
            f'<path d="M{_LEFT} {_HEIGHT}H{_WIDTH - _LEFT}" stroke="currentColor"/>'
            f'<g fill="currentColor">{_ticks(float(edges[0]), float(edges[-1]))}'
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 34}" text-anchor="middle">{escaped(self.label)}</text></g></svg>'
        )


def _bars(counts: np.ndarray, edges: np.ndarray, tallest: int, color: str, name: str) -> str:
    width = (_WIDTH - 2 * _LEFT) / len(counts)
    made = []
    for place, number in enumerate(counts.tolist()):
        if number:
            height = (_HEIGHT - _TOP) * number / tallest
            told = f"{name}: {number} from {figure(float(edges[place]))} to {figure(float(edges[place + 1]))}"
            made.append(
                f'<rect x="{_LEFT + place * width:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" fill="{color}" fill-opacity=".7"><title>{escaped(told)}</title></rect>'
            )
    return "".join(made)


def _ticks(low: float, high: float) -> str:
    places = [(_LEFT, low, "start"), (_WIDTH / 2, (low + high) / 2, "middle"), (_WIDTH - _LEFT, high, "end")]
    return "".join(
        f'<text x="{x}" y="{_HEIGHT + 15}" text-anchor="{anchor}">{escaped(figure(value))}</text>'
        for x, value, anchor in places
    )


def _range(name: str, values: np.ndarray) -> str:
    if not len(values):
        return f"{name}: none"
    return f"{name}: {len(values)} from {figure(float(values.min()))} to {figure(float(values.max()))}"


def _finite(values: Sequence[float]) -> np.ndarray:
    found = np.asarray(values, dtype=np.float64)
    return found[np.isfinite(found)]
