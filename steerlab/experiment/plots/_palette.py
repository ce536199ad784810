"""Colours by role. Roles that meet in one plot differ in luminance: for the colour-blind, and for grey print."""

from typing import Final

from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb

from steerlab.experiment._wording import CONTROL_NAMES

REAL: Final = "#00457A"
"""The vector under test, and the steered arm."""

AGAINST: Final = "#D55E00"
"""What speaks against the vector: anti-steerable items, the bound on the cost."""

RANDOM: Final = "#8F8F8F"
"""Random directions."""

BASE: Final = "#8F8F8F"
"""The unsteered arm."""

FLIPS: Final = "#774C00"
"""Label flips."""

ELSEWHERE: Final = "#A3579A"
"""The same vector at another layer."""

INK: Final = "#222222"
"""Zero lines, and text inside a plot."""

FAMILIES: Final = {
    family: (colour, CONTROL_NAMES[family])
    for family, colour in (("random", RANDOM), ("shuffled", FLIPS), ("wrong_layer", ELSEWHERE))
}
"""Control family → its colour and its name."""

NOTES: Final = 7.5
"""Size of words inside a plot, in points."""

_LOW, _MIDDLE, _HIGH = "#B24A00", "#FAFAFA", "#1A6AAB"

DIVERGING: Final = LinearSegmentedColormap.from_list("steerlab_diverging", [_LOW, _MIDDLE, _HIGH])
"""Orange below 0, white at 0, blue above it; equally dark on both sides."""

PALE: Final = LinearSegmentedColormap.from_list("steerlab_pale", ["#F2A36B", "#FFFFFF", "#8DBBE3"])
"""The same, light enough for dark text on it."""


def readable(colour: str) -> str:
    """The colour, darkened where words in it would have less contrast with white than 4.5 to 1 (WCAG 2.2)."""
    red, green, blue = to_rgb(colour)
    while 1.05 / (_luminance((red, green, blue)) + 0.05) < 4.5:
        red, green, blue = 0.95 * red, 0.95 * green, 0.95 * blue
    return to_hex((red, green, blue))


def _luminance(rgb: tuple[float, float, float]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
