"""Metrics: from the log-probabilities of an item's targets to one number."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from scipy.special import logsumexp

from steerlab.core._hashing import HASH_LENGTH, content_hash
from steerlab.core._numbers import as_number, plain, shown
from steerlab.core.errors import InputError
from steerlab.experiment._store.function_code import bytecode

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
        InputError: for an unknown name, or a function that cannot be called with two arguments.
    """
    if callable(metric):
        _check_takes_two(metric)
        return getattr(metric, "__name__", type(metric).__name__), metric
    if metric not in METRICS:
        raise InputError(f"Unknown metric {metric!r}; known: {', '.join(METRICS)}, or pass a function.")
    return metric, METRICS[metric]


def _check_takes_two(metric: Metric) -> None:
    try:
        inspect.signature(metric).bind(None, None)
    except ValueError:  # a built-in function without a signature
        return
    except TypeError as error:
        raise InputError(
            "A metric takes two arrays, the log p of an item's positive and of its negative targets, and gives a "
            f"number; {getattr(metric, '__name__', metric)} cannot be called so: {error}."
        ) from error


def metric_identity(metric: "str | Metric") -> str:
    """The identity of a metric: its name, and for a function a hash of what it computes.

    The hash covers the function's source (its bytecode where no source can be read), its defaults and the values it
    closes over; not the globals it uses.

    Examples:
        >>> metric_identity("choice_prob")
        'choice_prob'
    """
    name, function = find_metric(metric)
    return name if isinstance(metric, str) else f"{name}#{content_hash(_described(function))}"


def _described(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return ["partial", _described(function.func), repr(function.args), repr(sorted(function.keywords.items()))]
    if inspect.ismethod(function):
        return ["method", _described(function.__func__), _state(function.__self__)]
    if not inspect.isfunction(function):
        called = vars(type(function)).get("__call__")
        code = _described(called) if inspect.isfunction(called) else []
        return [type(function).__module__, type(function).__qualname__, code, _state(function)]
    closed = [repr(_content(cell)) for cell in function.__closure__ or ()]
    defaults = [repr(function.__defaults__), repr(function.__kwdefaults__)]
    return [function.__module__, function.__qualname__, _source(function), defaults, closed]


def _state(owner: Any) -> str:
    return repr(sorted(getattr(owner, "__dict__", {}).items()))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _source(function: Any) -> str:
    """Source, and bytecode with it: two lambdas of one line share their source."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = ""
    return hashlib.sha256(text.encode() + bytecode(function.__code__)).hexdigest()[:HASH_LENGTH]


def value_of(metric: Metric, positive: np.ndarray, negative: np.ndarray, item: int) -> float:
    """One item's value.

    Raises:
        InputError: if the metric gives something else than a finite number.
    """
    value = metric(positive, negative)
    # a comparison gives a bool, which counts as 0 or 1
    found = as_number(int(plain(value)) if isinstance(plain(value), bool) else value)
    if found is None:
        raise InputError(f"The metric gave {shown(value)} for item {item}; it must give a finite number.")
    return found
