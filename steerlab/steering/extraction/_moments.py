"""Running moments of activations: exact, in float64, and no larger for a million rows than for a thousand."""

import torch
from jaxtyping import Float
from scipy.linalg import eigh
from torch import Tensor

# Squared distances below this share of the squared size come from float32 rounding of the rows.
NOISE = 1e-10


class Scatter:
    """Sum and second moments of rows that come in chunks, for all layers at once.

    While there are at most d_model rows they are kept as they are, which is smaller; from then on they are folded into
    one [d_model, d_model] matrix per layer. Both give the same moments to float64 rounding.
    """

    def __init__(self) -> None:
        self.n = 0
        self._sum: Tensor | None = None
        self._rows: list[Tensor] = []
        self._outer: Tensor | None = None

    def add(self, rows: Float[Tensor, "n_layers rows d_model"]) -> None:
        wide = rows.double()
        self.n += rows.shape[1]
        total = wide.sum(dim=1)
        self._sum = total if self._sum is None else self._sum + total
        self._rows.append(wide)
        if self._outer is not None or self.n > rows.shape[2]:
            self._fold()

    def _fold(self) -> None:
        if self._outer is None:
            n_layers, _, width = self._rows[0].shape
            self._outer = self._rows[0].new_zeros(n_layers, width, width)
        while self._rows:
            rows = self._rows.pop(0)
            self._outer.baddbmm_(rows.mT, rows)

    @property
    def mean(self) -> Float[Tensor, "n_layers d_model"]:
        assert self._sum is not None
        return self._sum / self.n

    def second_moment(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        """Mean of x xᵀ at one layer, by its index."""
        if self._outer is not None:
            return self._outer[layer] / self.n
        rows = torch.cat([rows[layer] for rows in self._rows])
        return rows.mT @ rows / self.n

    def axes(self) -> Float[Tensor, "n_layers d_model"]:
        """Per layer the unit vector v with the largest mean (v·x)²; NaN where every row is zero."""
        return self._top(torch.zeros_like(self.mean))

    def centred_axes(self) -> Float[Tensor, "n_layers d_model"]:
        """Per layer the unit vector v with the largest variance of v·x; NaN where nothing varies."""
        return self._top(self.mean)

    def _top(self, centre: Float[Tensor, "n_layers d_model"]) -> Float[Tensor, "n_layers d_model"]:
        """Layer by layer, so that one layer's matrices are held at a time."""
        found = torch.stack([self._top_of(layer, point) for layer, point in enumerate(centre)])
        found = found.where(self._spread(centre)[:, None], torch.nan)
        return found / torch.linalg.vector_norm(found, dim=1, keepdim=True)

    def _top_of(self, layer: int, centre: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        if self._outer is not None:
            return _top_eigenvector(self.second_moment(layer) - centre[:, None] * centre[None, :])
        rows = torch.cat([rows[layer] for rows in self._rows]) - centre
        return rows.mT @ _top_eigenvector(rows @ rows.mT)

    def _spread(self, centre: Float[Tensor, "n_layers d_model"]) -> Tensor:
        """Whether a layer's rows differ from the centre by more than rounding."""
        if self._outer is None:
            square = sum(rows.square().sum(dim=(1, 2)) for rows in self._rows) / self.n
        else:
            square = self._outer.diagonal(dim1=1, dim2=2).sum(dim=1) / self.n
        assert isinstance(square, Tensor)
        return square - centre.square().sum(dim=1) > NOISE * square


def _top_eigenvector(matrix: Float[Tensor, "size size"]) -> Float[Tensor, " size"]:
    """Unit eigenvector of the largest eigenvalue of a symmetric matrix."""
    last = matrix.shape[0] - 1
    # LAPACK is faster for one eigenvector than for all.
    return torch.from_numpy(eigh(matrix.numpy(), subset_by_index=(last, last))[1][:, 0].copy())
