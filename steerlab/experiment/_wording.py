"""Numbers and names as plots and reports write them."""

from typing import Final, SupportsFloat

_METRICS: Final = {"log_prob_margin": "log-prob margin (nats)", "choice_prob": "p of the positive targets"}
CONTROL_NAMES: Final = {"random": "random directions", "shuffled": "label flips", "wrong_layer": "wrong layer"}
"""Families of control arms, in the order in which they are shown."""


def number(value: SupportsFloat, pattern: str = "g") -> str:
    """A number with a true minus sign.

    Examples:
        >>> number(-0.25), number(3.14159, "+.2f")
        ('−0.25', '+3.14')
    """
    return format(value if isinstance(value, int) else float(value), pattern).replace("-", "−")


def axis_label(axis: str) -> str:
    """What a strength axis shows, for `dose` or `scale`."""
    return "dose (median residual norms)" if axis == "dose" else "scale (multiples of the plan)"


def slope_label(axis: str) -> str:
    return f"slope (per unit of {axis})"


def metric_label(metric: str) -> str:
    """A metric's name with its unit, as far as it is one of ours."""
    return _METRICS.get(metric, metric.replace("_", " "))
