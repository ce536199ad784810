"""Metrics: from the log-probabilities of an item's targets to one number."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from scipy.special import logsumexp

from steerlab.core.errors import InputError

Metric = Callable[[np.ndarray, np.ndarray], float]


def log_prob_margin(positive: np.ndarray, negative: np.ndarray) -> float:
    """Mean log p of the positive targets minus mean log p of the negative ones, in nats."""
    return float(positive.mean() - negative.mean())


def choice_prob(positive: np.ndarray, negative: np.ndarray) -> float:
    """Share of the positive targets in the probability of all targets: Σ p⁺ / (Σ p⁺ + Σ p⁻)."""
    total: Any = logsumexp(np.concatenate([positive, negative]))
    return float(np.exp(logsumexp(positive) - total))


METRICS: Final[dict[str, Metric]] = {"log_prob_margin": log_prob_margin, "choice_prob": choice_prob}


def find_metric(metric: "str | Metric") -> tuple[str, Metric]:
    """Name and function of a metric.

    Args:
        metric: a name, or a function of (log p of positive targets, log p of negative targets) → number.

    Raises:
        InputError: for an unknown name.
    """
    if callable(metric):
        return getattr(metric, "__name__", "custom"), metric
    if metric not in METRICS:
        raise InputError(f"Unknown metric {metric!r}; known: {', '.join(METRICS)}, or pass a function.")
    return metric, METRICS[metric]
