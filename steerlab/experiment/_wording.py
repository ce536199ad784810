"""Numbers and names as plots and reports write them."""

import math
import re
from typing import Final, SupportsFloat

_PLACES: Final = re.compile(r"(\+?)\.([1-9])f")
_METRICS: Final = {"log_prob_margin": "log-prob margin (nats)", "choice_prob": "p of the positive targets"}
CONTROL_NAMES: Final = {"random": "random directions", "shuffled": "label flips", "wrong_layer": "wrong layer"}
"""Families of control arms, in the order in which they are shown."""


def number(value: SupportsFloat, pattern: str = "g") -> str:
    """A number with a true minus sign; with a pattern of fixed places as `in_figures`.

    Examples:
        >>> number(-0.25), number(3.14159, "+.2f"), number(-0.00314, "+.2f")
        ('−0.25', '+3.14', '−0.0031')
    """
    places = _PLACES.fullmatch(pattern)
    if places:
        return in_figures(float(value), places[1], int(places[2])).replace("-", "−")
    return format(value if isinstance(value, int) else float(value), pattern).replace("-", "−")


def in_figures(value: float, sign: str = "", places: int = 2) -> str:
    """A number with so many places, or with two digits where these would show fewer.

    Examples:
        >>> in_figures(1.234), in_figures(-0.00123, "+"), in_figures(0.0), in_figures(0.0123, places=3)
        ('1.23', '-0.0012', '0.00', '0.012')
    """
    small = 0 < abs(value) < 10.0 ** (1 - places)
    return format(value, f"{sign}.2g" if small else f"{sign}.{places}f")


def with_ends(value: float, low: float, high: float, places: int = 3) -> str:
    """A signed figure with the ends of its interval, if it has one.

    Examples:
        >>> with_ends(0.5, 0.25, 0.75), with_ends(0.00123, float("nan"), float("nan"))
        ('+0.500 [+0.250, +0.750]', '+0.0012')
    """
    mean, *ends = (in_figures(one, "+", places) for one in (value, low, high))
    return mean if math.isnan(low) else f"{mean} [{', '.join(ends)}]"


def axis_label(axis: str) -> str:
    """What a strength axis shows, for `dose` or `scale`."""
    return "dose (median residual norms)" if axis == "dose" else "scale (multiples of the plan)"


def slope_label(axis: str) -> str:
    return f"slope (per unit of {axis})"


def metric_label(metric: str) -> str:
    """A metric's name with its unit, as far as it is one of ours."""
    return _METRICS.get(metric, metric.replace("_", " "))
