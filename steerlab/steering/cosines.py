"""Cosines between vectors, as a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from steerlab.core.errors import InputError, VectorMismatchError
from steerlab.display import Grid, Piece, Scale, Shown, figure
from steerlab.steering.vectors import SteeringVector

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class CosineMatrix(Shown):
    """Cosines between the vectors of two lists, or of one with itself.

    Attributes:
        rows: a name per row.
        columns: a name per column.
        values: float64, shape [rows, columns].
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray = field(repr=False)

    def to_frame(self) -> "pd.DataFrame":
        """A frame with the names at both sides."""
        import pandas as pd

        return pd.DataFrame(self.values, index=list(self.rows), columns=list(self.columns))

    def _finding(self) -> str:
        shape = f"{len(self.rows)} × {len(self.columns)}"
        others = self.values[~np.eye(len(self.rows), dtype=bool)] if self.rows == self.columns else self.values.ravel()
        if not len(others):
            return shape
        return f"{shape}, from {figure(float(others.min()))} to {figure(float(others.max()))}"

    def _pieces(self) -> Sequence[Piece]:
        return [Grid(self.rows, self.columns, self.values, Scale(-1.0, 1.0, True), "cosine", more=".to_frame()")]


def cosine_matrix(vectors: Sequence[SteeringVector], others: Sequence[SteeringVector] | None = None) -> CosineMatrix:
    """Cosines between every two vectors, whatever their hook points.

    Args:
        vectors: a row each.
        others: a column each; the same vectors by default.

    Raises:
        InputError: without vectors.
        VectorMismatchError: for vectors of different widths.
        VectorValueError: for a zero vector.
    """
    right = vectors if others is None else others
    if not vectors or not right:
        raise InputError("Cosines are taken between vectors; there are none.")
    widths = sorted({vector.d_model for vector in (*vectors, *right)})
    if len(widths) > 1:
        raise VectorMismatchError(f"Vectors of widths {widths} have no cosine.")
    a, b = (torch.stack([vector.unit.double() for vector in side]) for side in (vectors, right))
    return CosineMatrix(_names(vectors), _names(right), (a @ b.T).numpy())


def _names(vectors: Sequence[SteeringVector]) -> tuple[str, ...]:
    """Layers where the vectors differ in nothing else, else names with layers."""
    names = {vector.name for vector in vectors}
    if len(names) <= 1:
        return tuple(f"layer {vector.layer}" for vector in vectors)
    return tuple(f"{vector.name or 'a vector'} at layer {vector.layer}" for vector in vectors)
