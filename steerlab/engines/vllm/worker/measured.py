"""What passes measured of one request, put together: each prediction once, the later value where one was run again."""

import numpy as np

from steerlab.engines.vllm.worker.measuring import DRAWN, Part
from steerlab.engines.vllm.worker.steering_state import Account, Draws
from steerlab.measures.quantities import LogDistribution


def gathered(account: Account) -> tuple[np.ndarray, np.ndarray]:
    """Values of a request's predictions.

    Returns:
        Which predictions were measured, in order (tokens of its score, or positions after which it sampled), and per
        quantity with one value a prediction its values, in the order in which the request names them; float32
        [quantities, predictions].
    """
    score = account.spec.score
    if score is None:
        return _drawn(account.draws)
    names = tuple(m for m in score.measures if not isinstance(m, LogDistribution))
    if not account.measured:
        return np.zeros(0, dtype=np.int64), np.zeros((len(names), 0), dtype=np.float32)
    at, last = _last_of_each(account.measured)
    if len(account.measured) == 1:
        return at, account.measured[0].values(names)
    return at, np.concatenate([part.values(names) for part in account.measured], axis=1)[:, last]


def _drawn(draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Log q by position, [1, positions]."""
    values = [found.host[DRAWN][row] for found, row in zip(draws.found, draws.rows, strict=True)]
    last = dict(zip(draws.positions, values, strict=True))
    at = sorted(last)
    return np.array(at, dtype=np.int64), np.array([[last[position] for position in at]], dtype=np.float32)


def gathered_distribution(account: Account) -> np.ndarray | None:
    """Log-distributions of a request's predictions, float32 [predictions, d_vocab]; None if none were asked for."""
    if account.spec.score is None or LogDistribution() not in account.spec.score.measures:
        return None
    _, last = _last_of_each(account.measured)
    for part in account.measured:
        _ = part.found.host  # waits for the device, which writes the distributions before
    return np.concatenate([part.found.distributions[part.row].numpy() for part in account.measured])[last]


def _last_of_each(parts: list[Part]) -> tuple[np.ndarray, np.ndarray]:
    """Every prediction once, in order, and where its last value is among those of all parts."""
    if len(parts) == 1:
        order = np.arange(parts[0].count)
        return order + parts[0].first, order
    every = np.concatenate([np.arange(part.first, part.first + part.count) for part in parts])
    at, from_end = np.unique(every[::-1], return_index=True)
    return at, len(every) - 1 - from_end
