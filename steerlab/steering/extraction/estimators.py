"""Estimators: from activations of positive and negative prompts to a direction, for all layers at once.

With h⁺ and h⁻ the rows of a pair and d = h⁺ − h⁻:

| method | direction | length |
| --- | --- | --- |
| `mean_diff` | mean(d) | that of mean(d) |
| `act_add` | d of one pair | that of d |
| `pca_uncentred` | top eigenvector of mean(d dᵀ) | 1 |
| `pca_centred` | top eigenvector of cov(d) | 1 |
| `lat` | top eigenvector of cov(δ), δ between random pairs of all prompts | 1 |
| `lda` | Σ⁻¹ mean(d), Σ the shrunk covariance within the sides | 1 |
| `logistic` | weights of a logistic regression of side on row | 1 |

Every direction points from negative to positive: mean(d)·v ≥ 0. All but `logistic` see each row once and keep moments.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core.errors import InputError, VectorValueError
from steerlab.steering.extraction._axes import Axis, Chunk, Differences, Lda, Logistic, PrincipalAxis, labels_of
from steerlab.steering.extraction._moments import Scatter

RowEstimator = Callable[[Float[Tensor, "pairs d_model"], Float[Tensor, "pairs d_model"]], Float[Tensor, " d_model"]]


def mean_diff(
    positive: Float[Tensor, "pairs d_model"], negative: Float[Tensor, "pairs d_model"]
) -> Float[Tensor, " d_model"]:
    """Mean of the differences h⁺ − h⁻, summed in float64.

    Source:
        Rimsky et al. 2023, Steering Llama 2 via Contrastive Activation Addition (arXiv:2312.06681), equation 1.
    """
    return estimate("mean_diff", positive[None], negative[None])[0]


def random_pairs(n_pairs: int, seed: int) -> tuple[list[int], list[int]]:
    """Random pairs of all 2n prompts (positives, then negatives): n indices, and those of their partners."""
    order = np.random.default_rng([seed, n_pairs]).permutation(2 * n_pairs).tolist()
    return order[:n_pairs], order[n_pairs:]


_METHODS: Final[dict[str, Callable[[], Axis]]] = {
    "mean_diff": Differences,
    "act_add": Differences,
    "pca_uncentred": lambda: PrincipalAxis(Chunk.signed, Scatter.axes),
    "pca_centred": lambda: PrincipalAxis(Chunk.signed, Scatter.centred_axes),
    "logistic": Logistic,
    "lda": Lda,
    "lat": lambda: PrincipalAxis(lambda chunk: chunk.first.double() - chunk.second.double(), Scatter.centred_axes),
}
METHODS: Final = tuple(_METHODS)
KEEPS_LENGTH: Final = ("mean_diff", "act_add")


class Estimate:
    """One method, applied to chunks of rows.

    Args:
        method: one of `METHODS`.

    Raises:
        InputError: for an unknown method.
    """

    def __init__(self, method: str) -> None:
        self.method = check_method(method)
        self.differences = Differences()
        self._axis: Axis = self.differences if method in KEEPS_LENGTH else _METHODS[method]()

    def add(self, chunk: Chunk) -> None:
        """Adds rows."""
        self.differences.add(chunk)
        if self._axis is not self.differences:
            self._axis.add(chunk)

    def vectors(self) -> Float[Tensor, "n_layers d_model"]:
        """Per layer the vector, float32, with the method's length, pointing from negative to positive."""
        axes = self._axis.axes()
        if self.method in KEEPS_LENGTH:
            return axes.float()
        along = (axes * self.differences.axes()).sum(dim=1, keepdim=True)
        unit = axes / torch.linalg.vector_norm(axes, dim=1, keepdim=True)
        return torch.where(along < 0, -unit, unit).float()

    def check(self, layers: Sequence[int]) -> None:
        """Checks that every layer has a direction.

        Raises:
            VectorValueError: naming the layers that have none.
        """
        alike = [layers[place] for place in self.differences.alike()]
        if alike:
            raise VectorValueError(
                f"Positive and negative activations are the same at layers {alike}: there is no direction there. "
                "Read positions (read=) where the prompts of a pair differ or come after a difference, or leave these "
                "layers out."
            )
        cancelled = [layers[place] for place in self.differences.cancelled()]
        if cancelled:
            raise VectorValueError(
                f"The differences of the pairs cancel to zero at layers {cancelled}, so no direction tells positive "
                "from negative; check which side is which."
            )

    def check_axes(self, vectors: Float[Tensor, "n_layers d_model"], layers: Sequence[int]) -> None:
        """Checks that the method found an axis at every layer.

        Raises:
            VectorValueError: naming the layers where it found none.
        """
        missing = [layer for layer, vector in zip(layers, vectors, strict=True) if not torch.isfinite(vector).all()]
        if missing:
            raise VectorValueError(
                f"The {self.differences.n} differences do not vary at layers {missing}, so {self.method} has no axis "
                "there; use more pairs, or method='mean_diff'."
            )

    def cosines(self, vectors: Float[Tensor, "n_layers d_model"]) -> Float[Tensor, " n_layers"]:
        """Cosine of each vector with the mean difference."""
        return torch.nn.functional.cosine_similarity(vectors.double(), self.differences.axes(), dim=1)


def estimate(
    method: str,
    positive: Float[Tensor, "n_layers pairs d_model"],
    negative: Float[Tensor, "n_layers pairs d_model"],
    *,
    seed: int = 0,
) -> Float[Tensor, "n_layers d_model"]:
    """A method's vectors from rows in memory.

    Args:
        method: one of `METHODS`.
        positive: h⁺ of each pair.
        negative: h⁻ of each pair.
        seed: of the random pairs of `lat`.
    """
    found = Estimate(method)
    found.add(_random_chunk(positive, negative, seed) if method == "lat" else Chunk.of_pairs(positive, negative))
    return found.vectors()


def estimator(method: str) -> RowEstimator:
    """The method of this name, as a function of one layer's positive and negative rows.

    Raises:
        InputError: for an unknown name; lists the known ones.
    """
    check_method(method)
    if method == "mean_diff":
        return mean_diff
    return lambda positive, negative: estimate(method, positive[None], negative[None])[0]


def check_method(method: str, others: Sequence[str] = ()) -> str:
    """The method itself, if it is one of this module.

    Raises:
        InputError: otherwise; lists these, and others that the caller knows.
    """
    if method not in _METHODS:
        raise InputError(f"Unknown extraction method {method!r}; known: {', '.join([*METHODS, *others])}.")
    return method


def _random_chunk(positive: Tensor, negative: Tensor, seed: int) -> Chunk:
    pooled = torch.cat([positive, negative], dim=1)
    n_pairs = positive.shape[1]
    first, second = (torch.tensor(side) for side in random_pairs(n_pairs, seed))
    return Chunk(pooled[:, first], pooled[:, second], labels_of(torch.stack([first, second]), n_pairs))


# Methods whose result depends on which prompt of a pair is the positive one, so that flipped labels are a null for
# them. The principal axes of d are those of −d, and lat mixes all prompts.
ESTIMATORS: Final[dict[str, RowEstimator]] = {name: estimator(name) for name in ("mean_diff", "logistic", "lda")}
