"""Interaction of two factors: what a combination does beyond the sum of its parts."""

import numpy as np
from jaxtyping import Float


def interaction_residuals(
    values: Float[np.ndarray, "items a b"], zero_a: int, zero_b: int
) -> Float[np.ndarray, "items a b"]:
    """What the additive model leaves, per item and cell of a grid: y_ab − y_a0 − y_0b + y_00.

    Zero in the row and column of the baseline; positive where two changes together do more than each by itself.

    Args:
        values: y, one value per item and cell.
        zero_a: index along a of the level that changes nothing.
        zero_b: index along b of the level that changes nothing.

    Returns:
        Residuals in the unit of the values.

    Examples:
        >>> interaction_residuals(np.array([[[1.0, 2.0], [4.0, 9.0]]]), 0, 0)[0, 1, 1]  # 9 − 4 − 2 + 1
        np.float64(4.0)
    """
    alone_a, alone_b = values[:, :, [zero_b]], values[:, [zero_a], :]
    return values - alone_a - alone_b + values[:, [zero_a], :][:, :, [zero_b]]
