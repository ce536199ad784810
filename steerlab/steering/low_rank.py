"""A low-rank edit of the LoReFT family: the matrices of h → h + Rᵀ(W h + b − R h)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._hashing import bytes_hash
from steerlab.core.errors import VectorShapeError, VectorValueError

# How far R Rᵀ may be from the identity: rows kept in bfloat16 are off by a few thousandths.
TOLERANCE = 0.02


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrices of Δ(h) = Rᵀ(W h + b − R h). Two are equal if all their numbers are.

    Attributes:
        rotation: R, float32 [rank, d_model]; its rows are orthonormal.
        weight: W, float32 [rank, d_model].
        bias: b, float32 [rank].

    Raises:
        VectorShapeError: if they do not fit together.
        VectorValueError: if they hold NaN or infinities, or the rows of R are not orthonormal.

    Examples:
        >>> edit = LowRank(torch.eye(1, 3), torch.zeros(1, 3), torch.tensor([2.0]))
        >>> edit.change(torch.tensor([5.0, 1.0, 1.0]))
        tensor([-3.,  0.,  0.])

    Source:
        Wu et al. 2024, ReFT: Representation Finetuning for Language Models (arXiv:2404.03592), equation 2.
    """

    rotation: Tensor
    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        for name in ("rotation", "weight", "bias"):
            given = getattr(self, name)
            if not isinstance(given, Tensor) or not given.is_floating_point():
                raise VectorShapeError(f"{name} of a low-rank edit is a floating-point tensor, got {given!r:.60}.")
            object.__setattr__(self, name, given.detach().to("cpu", torch.float32).clone().contiguous())
        rotation, weight, bias = self.rotation, self.weight, self.bias
        fits = rotation.ndim == 2 and 1 <= rotation.shape[0] <= rotation.shape[1]
        if not fits or weight.shape != rotation.shape or bias.shape != rotation.shape[:1]:
            raise VectorShapeError(
                "A low-rank edit has R [rank, d_model], W [rank, d_model] and b [rank] with rank ≤ d_model, got "
                f"{list(rotation.shape)}, {list(weight.shape)} and {list(bias.shape)}."
            )
        if not all(torch.isfinite(part).all() for part in (rotation, weight, bias)):
            raise VectorValueError("A low-rank edit holds NaN or infinite values.")
        error = orthonormality_error(rotation)
        if not error <= TOLERANCE:
            raise VectorValueError(
                f"The rows of R are not orthonormal: R Rᵀ is {error:.3g} from the identity (allowed: {TOLERANCE})."
            )

    @property
    def rank(self) -> int:
        """Rows of R."""
        return self.rotation.shape[0]

    @property
    def d_model(self) -> int:
        """Width of the stream."""
        return self.rotation.shape[1]

    @property
    def read(self) -> Float[Tensor, "rank d_model"]:
        """W − R: Δ(h) = Σ_i ((W − R)_i·h + b_i) R_i."""
        return self.weight - self.rotation

    def change(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Δ(h), float32."""
        return (h.float() @ self.read.T + self.bias) @ self.rotation

    def turned(self, rng: np.random.Generator) -> "LowRank":
        """The same edit in a stream that is rotated at random: what it does to other directions than its own.

        R and W are turned together by a rotation drawn from all alike, so that everything between them is kept.
        """
        rows = torch.cat([self.rotation, self.weight]).double()
        _, sizes, axes = torch.linalg.svd(rows, full_matrices=False)
        axes = axes[sizes > 1e-6 * sizes[0]]
        drawn = torch.from_numpy(rng.standard_normal((self.d_model, len(axes))))
        basis, corner = torch.linalg.qr(drawn)
        turned = (rows @ axes.T @ (basis * corner.diagonal().sign()).T).float()
        return LowRank(turned[: self.rank], turned[self.rank :], self.bias)

    @property
    def hash(self) -> str:
        """Content hash of the matrices."""
        parts = (self.rotation, self.weight, self.bias)
        return bytes_hash(b"".join(part.numpy().astype("<f4").tobytes() for part in parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LowRank) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


def orthonormality_error(rotation: Float[Tensor, "rank d_model"]) -> float:
    """Largest entry of |R Rᵀ − I|."""
    gram = rotation.double() @ rotation.double().T
    return float((gram - torch.eye(len(rotation), dtype=torch.float64)).abs().max())
