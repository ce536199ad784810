"""Colours by role. Roles that meet in one plot differ in luminance: for the colour-blind, and for grey print."""

from typing import Final

from matplotlib.colors import LinearSegmentedColormap

from steerlab.experiment.wording import CONTROL_NAMES

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

_LOW, _MIDDLE, _HIGH = "#B24A00", "#FAFAFA", "#1A6AAB"

DIVERGING: Final = LinearSegmentedColormap.from_list("steerlab_diverging", [_LOW, _MIDDLE, _HIGH])
"""Orange below 0, white at 0, blue above it; equally dark on both sides."""

PALE: Final = LinearSegmentedColormap.from_list("steerlab_pale", ["#F2A36B", "#FFFFFF", "#8DBBE3"])
"""The same, light enough for dark text on it."""
