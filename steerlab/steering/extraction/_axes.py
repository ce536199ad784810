"""The axis that each extraction method finds in the activations of contrast pairs, from running sums."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.steering.extraction._moments import NOISE, Scatter


@dataclass(frozen=True)
class Chunk:
    """Activations of prompts in pairs, for all layers.

    Attributes:
        first: one row of each pair, shape [n_layers, pairs, d_model].
        second: the other row of each pair.
        labels: +1 for rows of positive prompts, −1 for rows of negative ones, shape [2, pairs].
    """

    first: Float[Tensor, "n_layers pairs d_model"]
    second: Float[Tensor, "n_layers pairs d_model"]
    labels: Float[Tensor, "2 pairs"]

    @classmethod
    def of_pairs(
        cls, positive: Float[Tensor, "n_layers pairs d_model"], negative: Float[Tensor, "n_layers pairs d_model"]
    ) -> "Chunk":
        """Contrast pairs as they are."""
        return cls(positive, negative, torch.tensor([[1.0], [-1.0]]).double().expand(2, positive.shape[1]))

    def signed(self) -> Float[Tensor, "n_layers pairs d_model"]:
        """Positive rows minus negative ones, float64; for contrast pairs the differences d."""
        return self.first.double() * self.labels[0][:, None] + self.second.double() * self.labels[1][:, None]


class Axis(Protocol):
    """Accumulates activations, and gives the axis that a method finds in them."""

    def add(self, chunk: Chunk) -> None: ...

    def axes(self) -> Float[Tensor, "n_layers d_model"]:
        """Per layer an axis of any length and sign, float64; NaN where there is none."""
        ...


class Differences:
    """Sums over all pairs: the mean difference, and its size relative to the rows."""

    def __init__(self) -> None:
        self.n = 0
        self._signed: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, chunk: Chunk) -> None:
        signed = chunk.signed().sum(dim=1)
        squares = torch.stack([_square(chunk.first) + _square(chunk.second), _square(chunk.first - chunk.second)])
        self.n += chunk.first.shape[1]
        self._signed = signed if self._signed is None else self._signed + signed
        self._squares = squares if self._squares is None else self._squares + squares

    def axes(self) -> Float[Tensor, "n_layers d_model"]:
        """The mean of d, float64."""
        assert self._signed is not None
        return self._signed / self.n

    def alike(self) -> list[int]:
        """Indices of layers where the two rows of every pair are the same, to rounding."""
        assert self._squares is not None
        rows, differences = self._squares
        return (differences <= NOISE * 1e-2 * rows).nonzero()[:, 0].tolist()

    def cancelled(self) -> list[int]:
        """Indices of layers where the differences cancel, to rounding."""
        assert self._squares is not None
        mean_square = self._squares[0] / self.n
        return (self.axes().square().sum(dim=1) <= NOISE * 1e-2 * mean_square).nonzero()[:, 0].tolist()


class PrincipalAxis:
    """The axis along which differences are largest (uncentred) or vary most (centred).

    Args:
        differences: what is taken of a chunk, e.g. `Chunk.signed`.
        axes: what is taken of its moments: `Scatter.axes` or `Scatter.centred_axes`.
    """

    def __init__(self, differences: Callable[[Chunk], Tensor], axes: Callable[[Scatter], Tensor]) -> None:
        self._differences, self._axes = differences, axes
        self._scatter = Scatter()

    def add(self, chunk: Chunk) -> None:
        self._scatter.add(self._differences(chunk))

    def axes(self) -> Float[Tensor, "n_layers d_model"]:
        """Unit vectors."""
        return self._axes(self._scatter)


class Lda:
    """Fisher's discriminant Σ⁻¹ mean(d), Σ the covariance within the two sides, pooled.

    The coordinates are first brought to unit variance within the sides, then the covariance is shrunk towards a
    multiple of the identity by the oracle approximating formula, which needs second moments only; the result is turned
    back into the stream's own coordinates.

    Source:
        Chen, Wiesel, Eldar and Hero 2010, Shrinkage Algorithms for MMSE Covariance Estimation, equation 23, without its
        terms in 2/p, as scikit-learn has it.
    """

    def __init__(self) -> None:
        self._positive, self._negative = Scatter(), Scatter()

    def add(self, chunk: Chunk) -> None:
        self._positive.add(chunk.first)
        self._negative.add(chunk.second)

    def axes(self) -> Float[Tensor, "n_layers d_model"]:
        """Discriminants, layer by layer, so that one matrix is held at a time; NaN where nothing varies in a side."""
        return torch.stack([self._axis(layer) for layer in range(len(self._positive.mean))])

    def _axis(self, layer: int) -> Float[Tensor, " d_model"]:
        within = sum(_covariance(side, layer) for side in (self._positive, self._negative)) / 2
        assert isinstance(within, Tensor)
        deviations = within.diagonal().clamp_min(0).sqrt()
        if not deviations.any():
            return torch.full_like(deviations, torch.nan)
        scale = deviations.clamp_min(max(1e-6 * float(deviations.max()), torch.finfo(torch.float32).tiny))
        correlation = within / scale[:, None] / scale[None, :]
        difference = (self._positive.mean[layer] - self._negative.mean[layer]) / scale
        return torch.linalg.solve(shrunk(correlation, 2 * self._positive.n), difference) / scale


class Logistic:
    """Weights of an L2-regularised logistic regression (C = 1) of the side on the row.

    Coordinates are standardised for the fit, so that the penalty treats them alike; the weights are then those of the
    stream's own coordinates. All rows are kept: 8·pairs·layers·d_model bytes.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor]] = []

    def add(self, chunk: Chunk) -> None:
        self._rows.append((chunk.first.clone(), chunk.second.clone()))

    def axes(self) -> Float[Tensor, "n_layers d_model"]:
        """Weights, layer by layer."""
        n_layers = self._rows[0][0].shape[0]
        return torch.stack([self._axis(layer) for layer in range(n_layers)])

    def _axis(self, layer: int) -> Float[Tensor, " d_model"]:
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        sides = [torch.cat([rows[side][layer] for rows in self._rows]) for side in (0, 1)]
        scaler = StandardScaler()
        rows = scaler.fit_transform(torch.cat(sides).double().numpy())
        labels = np.repeat([1, 0], [len(side) for side in sides])
        fitted = LogisticRegression(C=1.0, tol=1e-8, max_iter=5000).fit(rows, labels)
        return torch.from_numpy(fitted.coef_[0] / scaler.scale_)


def shrunk(covariance: Float[Tensor, "d_model d_model"], n_rows: int) -> Float[Tensor, "d_model d_model"]:
    """A covariance of n rows, shrunk towards the identity times its mean variance by the oracle approximating weight.

    Weight ρ = min(1, (a + μ²) / ((n + 1)(a − μ²/p))), with a the mean squared entry, μ the mean variance and p the
    width; at least 1e-6, so that the result can be inverted.
    """
    width = covariance.shape[0]
    mean_square, mean_variance = covariance.square().mean(), covariance.trace() / width
    excess = (n_rows + 1) * (mean_square - mean_variance**2 / width)
    weight = ((mean_square + mean_variance**2) / excess).clamp(1e-6, 1.0) if excess > 0 else covariance.new_ones(())
    return (1 - weight) * covariance + weight * mean_variance * torch.eye(width, dtype=covariance.dtype)


def labels_of(indices: Tensor, n_pairs: int) -> Tensor:
    """+1 for prompts that are positives, −1 for negatives, float64; indices into positives, then negatives."""
    return torch.where(indices < n_pairs, 1.0, -1.0).double()


def _square(rows: Float[Tensor, "n_layers pairs d_model"]) -> Float[Tensor, " n_layers"]:
    return rows.double().square().sum(dim=(1, 2))


def _covariance(side: Scatter, layer: int) -> Float[Tensor, "d_model d_model"]:
    mean = side.mean[layer]
    return side.second_moment(layer) - mean[:, None] * mean[None, :]
